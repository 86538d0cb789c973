"""TensorBoard's event file, written in the caller's thread, so that an error surfaces in the call that caused it."""

from __future__ import annotations

import os
import socket
import time as clock
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
from tensorboard.plugins.text import metadata as text_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron_run.files.safe_folder import SafeFolder

if TYPE_CHECKING:
    from PIL.Image import Image


class EventFile:
    """A new event file in ``folder`` for the steps from ``first_step`` on.

    It opens with a session start, which makes TensorBoard drop an earlier attempt's values from that step on; with
    None it only adds to them. ``last_step`` is the latest step written. Raises OSError when folder or file cannot be
    written.
    """

    def __init__(self, folder: Path, first_step: int | None = None) -> None:
        files = SafeFolder(folder.parent)
        files.make(folder.name)
        now = clock.time()
        name = f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(files.create(f"{folder.name}/{name}"))
        self.last_step = 0 if first_step is None else first_step - 1
        self._write(event_pb2.Event(wall_time=now, file_version="brain.Event:2"))
        if first_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=now, step=first_step, session_log=start))

    def scalars(self, numbers: Mapping[str, float], step: int, time: float | None = None) -> None:
        """Write each number under its tag; ``time`` in seconds since the epoch, None for now."""
        self._summary([summary_pb2.Summary.Value(tag=tag, simple_value=n) for tag, n in numbers.items()], step, time)

    def text(self, tag: str, markdown: str, step: int) -> None:
        """Write ``markdown`` for the text tab."""
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[markdown.encode()])
        value = summary_pb2.Summary.Value(
            tag=tag, metadata=text_metadata.create_summary_metadata("", ""), tensor=tensor
        )
        self._summary([value], step)

    def image(self, tag: str, picture: Image, step: int) -> None:
        """Write ``picture`` for the images tab."""
        png = BytesIO()
        picture.save(png, format="PNG")
        image = summary_pb2.Summary.Image(
            height=picture.height, width=picture.width, colorspace=3, encoded_image_string=png.getvalue()
        )
        self._summary([summary_pb2.Summary.Value(tag=tag, image=image)], step)

    def _summary(self, values: list[Any], step: int, time: float | None = None) -> None:
        wall_time = clock.time() if time is None else time
        self._write(event_pb2.Event(wall_time=wall_time, step=step, summary=summary_pb2.Summary(value=values)))
        self.last_step = max(self.last_step, step)

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        self._records.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._records.close()

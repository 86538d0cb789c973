"""What no capture could serve, refused while a run is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.errors import InputError

if TYPE_CHECKING:
    from megatron_run.config.schema import Config
    from megatron_run.graphs.capture import CaptureOptions


def refuse_misfits(plugin: str, config: Config, options: CaptureOptions) -> None:
    """For a plugin's ``check_config``: raise :class:`InputError` for what would never be replayed, or end ``strict``.

    ``plugin`` is the name that messages give it.
    """
    if options.strict and config.train.ramp_up is not None:
        raise InputError(
            "graph-capture.strict=true with train.ramp_up",
            why="the number of microbatches changes on the way, and each change needs another capture",
            fix="leave one of them out",
        )
    if config.train.recompute == "full":
        raise InputError(
            f"graph-capture={plugin} with train.recompute=full",
            why="a layer that is recomputed in the backward must run eagerly",
            fix="set train.recompute=none, or choose --plugin graph-capture=none",
        )

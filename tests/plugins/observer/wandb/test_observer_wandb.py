"""observer=wandb: what reaches the library, in its offline mode and without a server."""

from __future__ import annotations

import json
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_run.contracts import EvalMetrics
from megatron_run.contracts.observer import STEP_CURVES
from megatron_run_observer_wandb import Options, WeightsAndBiases
from megatron_run_testing.observer import example_run, example_step, observer_checks
from tests.contracts.conformance import failures

#: Bytes of a block of LevelDB's log.
BLOCK = 32768

pytestmark = [
    pytest.mark.multiproc,  # the library sends from a process of its own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor does the library read the metadata of everything that is installed, in each run anew."""
    pytest.importorskip("wandb")
    monkeypatch.setattr("wandb.util.working_set", lambda: ())
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # where a key would be
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)


def records(path: Path) -> Iterator[bytes]:
    """The records of a ``.wandb`` file: LevelDB's log format after a header of 7 bytes.

    https://github.com/google/leveldb/blob/main/doc/log_format.md: blocks of 32 KiB, in which each part has a checksum
    (4 bytes), a length (2) and a type (1): 1 whole, 2 first, 3 middle, 4 last.
    """
    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK  # the rest of a block is too short for a header
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def written(folder: Path) -> list[dict[str, Any]]:
    """Every row of every offline run below ``folder``, and a row for each opening of a run."""
    from wandb.proto import wandb_internal_pb2 as messages

    rows: list[dict[str, Any]] = []
    for path in sorted(folder.rglob("*.wandb")):
        for content in records(path):
            record = messages.Record()  # type: ignore[attr-defined]  # generated code without stubs
            record.ParseFromString(content)
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
            elif record.HasField("run"):
                rows.append(
                    {"run_id": record.run.run_id, "project": record.run.project, "name": record.run.display_name}
                )
    return rows


def test_it_passes_its_kinds_suite() -> None:
    assert failures(observer_checks(lambda: WeightsAndBiases(Options(mode="offline")))) == {}


def test_two_attempts_are_one_run_with_every_number(tmp_path: Path) -> None:
    (tmp_path / "wide" / "run-000").mkdir(parents=True)
    (tmp_path / "wide" / "sweep.json").touch()
    for attempt, steps in ((1, (1, 2, 3)), (2, (3, 4))):
        observer = WeightsAndBiases(Options(project="mine", mode="offline"))
        observer.on_train_start(example_run(tmp_path / "wide" / "run-000", attempt=attempt, first_step=steps[0]))
        for step in steps:
            observer.on_step_end(example_step(step, attempt + step / 8))
        observer.on_eval_end(EvalMetrics(steps[-1], "test", 2.5, 12.5, 64))
        observer.on_train_end("stopped")
    rows = written(tmp_path)
    begun = {"run_id": "0123456789abcdef", "project": "mine", "name": "wide/run-000"}
    assert [row for row in rows if "run_id" in row] == [begun] * 2
    steps_seen = [row for row in rows if "train/loss" in row]
    assert [(row["step"], row["train/loss"]) for row in steps_seen] == [
        (1, 1.125),
        (2, 1.25),
        (3, 1.375),
        (3, 2.375),
        (4, 2.5),
    ]
    assert set(STEP_CURVES) | {"model/aux"} <= set(steps_seen[0])
    assert [row["eval_test/loss"] for row in rows if "eval_test/loss" in row] == [2.5, 2.5]


def test_without_a_key_it_is_offline_and_says_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.exit, sys.excepthook
    observer = WeightsAndBiases(Options())
    observer.on_train_start(example_run(tmp_path))
    assert (sys.exit, sys.excepthook) == before
    observer.on_train_end("finished")
    (file,) = tmp_path.rglob("*.wandb")
    assert f"wandb sync {file.parent}" in capsys.readouterr().out


def test_a_dead_server_leaves_the_run_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # connects, and never answers
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        observer = WeightsAndBiases(Options(mode="online", timeout_s=1))
        observer.on_train_start(example_run(tmp_path))
        observer.on_step_end(example_step(1))
        observer.on_train_end("finished")
    assert "did not answer within 1 s" in capsys.readouterr().out
    assert [row["step"] for row in written(tmp_path) if "train/loss" in row] == [1]

"""What reads our own files, which somebody else may have written: each with a valid one (``samples``)."""

from __future__ import annotations

import hashlib
import selectors
import shutil
import socket
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megatron_run.config.request import Request
from megatron_run.config.yaml import parse
from megatron_run.errors import ExitCode
from megatron_run.planning import resolve
from megatron_run_cli.main import main
from megatron_run_engine.builtin.observer.jsonl import LineFile
from megatron_run_engine.checkpoint.manifest import MANIFEST, read_manifest
from megatron_run_engine.checkpoint.reader import TensorFile
from megatron_run_engine.launch.watchdog.connection import Connection, Stranger, join_hub
from megatron_run_engine.launch.watchdog.hub import Hub
from megatron_run_engine.launch.watchdog.page import Page
from megatron_run_engine.run_folder import History, open_run_folder
from megatron_run_engine.run_folder.folder import RunFolder
from megatron_run_inference.source import find_source
from megatron_run_report.page import page
from megatron_run_report.record import Record
from tests.campaigns.fuzzed import CONFIG, PLAN, RUN, SAVED, WIRE, reads
from tests.campaigns.samples import RUN_VALUES
from tests.support.forked import tiny

# Configurations.


def _resolved(path: Path) -> object:
    return resolve(Request((str(path),), environment={}))


def _explained(path: Path) -> object:
    return run_command("config", "show", path)


def run_command(*words: object) -> object:
    """A command in this process, whose exit code is one of a user's mistakes."""
    code = main([str(word) for word in words])
    if code == ExitCode.OUT_OF_MEMORY:
        raise MemoryError
    if code == 1:
        raise AssertionError("exit code 1, which is that of a bug")
    return code


reads("YAML", CONFIG, "config/tiny.yaml", lambda path: parse(path.read_bytes().decode("latin-1"), "x"), share=4)
reads("a configuration, resolved", CONFIG, "config/tiny.yaml", _resolved, share=0.15)
reads("a configuration in JSON, resolved", CONFIG, "config/tiny.json", _resolved, "json", share=0.15)
reads("a configuration that is shown", CONFIG, "config/tiny.yaml", _explained, share=0.05)

# Run folders.


def _joined(path: Path) -> object:
    """A second attempt in the folder, as its user starts one."""
    try:
        opened = open_run_folder(_run_in(path.parent))
        opened.lock.release()
        return opened.folder.run_id, opened.folder.changed_keys
    finally:
        for made in path.parent.glob("logs/attempt-*"):
            if made.name != "attempt-001":
                shutil.rmtree(made)


@cache
def _run_in(folder: Path) -> Any:
    return resolve(tiny(folder, {**RUN_VALUES, "train.steps": 3}, nproc=1, extend=True))


def _status(path: Path) -> object:
    folder = RunFolder(path.parent, 1)
    folder.end(ExitCode.SIGTERM)
    return folder.read_status()


def _history(path: Path) -> object:
    history = History(path.parent)
    return history.metrics, history.losses, history.evaluations, history.best


def _continued(path: Path) -> None:
    LineFile(path).close()


def _reported(path: Path) -> object:
    return len(page([Record(path.parent)]).encode())


reads("run.json", RUN, "run/run.json", _joined, "json", share=0.03)
reads("status.json", RUN, "run/status.json", _status, "json", share=0.5)
reads("metrics.jsonl", RUN, "history/metrics.jsonl", _history, "lines", share=3)
reads("eval.jsonl", RUN, "history/eval.jsonl", _history, "lines", share=2)
reads("metrics.jsonl that goes on", RUN, "history/metrics.jsonl", _continued, "lines", share=1)
for _name, _change, _share in (
    ("history/metrics.jsonl", "lines", 0.3),
    ("history/eval.jsonl", "lines", 0.3),
    *((f"run/{each}.json", "json", 0.1) for each in ("run", "plan", "environment", "device", "status")),
    ("run/config.yaml", "bytes", 0.1),
):
    reads(f"{_name} in a report", RUN, _name, _reported, _change, share=_share)
reads("config.yaml of a run", RUN, "run/config.yaml", lambda path: find_source(path.parent), share=0.1)
reads("latest", RUN, "run/checkpoints/latest", lambda path: find_source(path.parent), share=0.1)

# Sweeps, and the catalogue of plugins.


def _swept(path: Path) -> object:
    from megatron_run_sweep.metric import read_metric
    from megatron_run_sweep.outcomes import outcomes, ranked
    from megatron_run_sweep.picture import drawing
    from megatron_run_sweep.record import read_sweep

    home = next(folder for folder in path.parents if folder.name == "sweep")
    there = read_sweep(home)
    found = ranked(outcomes(there, home, read_metric("loss")), maximize=False) if there else []
    return found, drawing(found, "eval.loss", maximize=False)


def _published(path: Path) -> object:
    from megatron_run_cli.reports.catalogue import read_catalogue, search

    return search(["a"], read_catalogue(str(path)), ())


reads("sweep.json", RUN, "sweep/sweep.json", _swept, "json", share=1)
reads("status.json in a sweep", RUN, "sweep/run-000/status.json", _swept, "json", share=0.5)
reads("eval.jsonl in a sweep", RUN, "sweep/run-000/eval.jsonl", _swept, "lines", share=1)
reads("a catalogue", CONFIG, "catalogue/plugins.json", _published, "json", share=1)

# Saved steps.


def _manifest_body(content: bytes) -> bytes:
    return content[len(b'{"manifest":') : content.rindex(b',\n"sha256"')]


def _manifest(whole: bytes, body: bytes) -> bytes:
    return b'{"manifest":' + body + b',\n"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def _read_manifest(path: Path) -> object:
    manifest = read_manifest(path.parent)
    return manifest.encode()


def _inspected(path: Path) -> object:
    return [run_command("checkpoint", word, path.parents[2]) for word in ("list", "inspect")]


def header_of(content: bytes) -> bytes:
    """The JSON before the tensors of a safetensors file."""
    return content[8 : 8 + int.from_bytes(content[:8], "little")]


def with_header(whole: bytes, header: bytes) -> bytes:
    """The safetensors file ``whole`` with another header."""
    return len(header).to_bytes(8, "little") + header + whole[8 + len(header_of(whole)) :]


def _tensors(path: Path) -> object:
    file = TensorFile(path)
    return [file.read(name).sum() for name, entry in file.entries.items() if entry.dtype != "BOOL"]


_MANIFEST, _TAKEN = (f"{home}/step1/{MANIFEST}" for home in ("saved", "run/checkpoints"))
_SHARD = "saved/step1/rank-00000.safetensors"
_sealed: Mapping[str, Any] = {"inner": _manifest_body, "pack": _manifest}
reads("a manifest", SAVED, _MANIFEST, _read_manifest, "json", share=2)
reads("a manifest with its SHA-256 made right", SAVED, _MANIFEST, _read_manifest, "json", **_sealed, share=4)
reads("a step that is inspected", SAVED, _TAKEN, _inspected, "json", **_sealed, share=0.2)
reads(
    "a step whose model is taken",
    SAVED,
    _TAKEN,
    lambda path: find_source(path.parents[2]),
    "json",
    **_sealed,
    share=0.15,
)
reads("a shard", SAVED, _SHARD, _tensors, share=4)
reads("a shard with its length made right", SAVED, _SHARD, _tensors, "json", header_of, with_header, share=4)

# What the planner reads.


def _device(path: Path) -> object:
    from megatron_run_planner.devices import LayerShape, read_device

    return read_device(str(path)).measured_ratio(LayerShape(1024, 16, 1024, 1, 4))


def _planned(path: Path) -> object:
    return run_command("plan", "preset:tiny", "--device", path)


def _table(path: Path) -> object:
    return run_command("plan", "check", path, "--device", "a100")


reads("a device", PLAN, "planner/device.yaml", _device, share=0.5)
reads("a table of runs", PLAN, "planner/runs.csv", _table, share=0.15)

# What comes over the network.


def _heard(path: Path) -> object:
    """What a hub makes of the lines of a sidecar that has proved itself."""
    heard, (near, far) = hub(), socket.socketpair()
    heard._states = [type(state)(None) for state in heard._states]
    heard._verdict, heard._provisional = {}, False
    connection = Connection(near)
    heard._connections[connection] = 1
    heard._selector.register(near, selectors.EVENT_READ, connection)
    far.sendall(path.read_bytes()[: 1 << 16])
    far.close()
    try:
        heard._looked = time.monotonic() - 1.0
        heard._receive(connection)
        heard._judge()
    finally:
        if connection in heard._connections:
            del heard._connections[connection]
            heard._forget(connection)
    return heard._verdict


@cache
def hub() -> Hub:
    """The hub of this process."""
    return Hub(2, 5.0, "of this run", "127.0.0.1")


def _greeted(path: Path) -> object:
    """Both ends of the handshake, with a stranger at the other end."""
    content = path.read_bytes()[: 1 << 16]
    near, far = socket.socketpair()
    with near, far:
        stranger = Stranger(Connection(near))
        far.sendall(content)
        far.shutdown(socket.SHUT_WR)
        if stranger.identify(Connection(near), "of this run", range(2)) is not None:
            raise AssertionError("a stranger was taken for a rank")
    near, far = socket.socketpair()
    with near:
        far.sendall(content)
        far.close()
        if join_hub(Connection(near), 1, "of this run", 1.0):
            raise AssertionError("a stranger was taken for the hub")
    return None


reads("messages of a sidecar", WIRE, "wire/sidecar", _heard, "lines", share=4)
reads("a handshake", WIRE, "wire/greeting", _greeted, "lines", share=2)
reads("a status page", WIRE, "wire/page", lambda path: Page.parse(path.read_bytes()) and None, share=3)

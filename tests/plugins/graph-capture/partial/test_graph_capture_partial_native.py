"""The executor in C++ where it can be built, and Python in its place where it cannot."""

from __future__ import annotations

import logging
import os
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_run.builtin.schedule.sequential import Sequential
from megatron_run.files.temporary_names import temporary_name
from megatron_run_graph_capture_partial import find_executor, native
from megatron_run_graph_capture_partial.tape import in_python, out_form
from tests.plugins.graph_bench import Pipeline
from tests.support.forked import ForkedCommand
from tests.support.processes import alive, wait_until

LOG = logging.getLogger("megatron_run")


def no_heartbeat() -> None:
    """Nobody supervises."""


@pytest.mark.slow  # a minute where it was never built; then it is kept
def test_the_native_executor_leaves_the_bits_of_eager_steps() -> None:
    try:
        native.build(LOG, no_heartbeat)
    except Exception as cause:  # noqa: BLE001 RUF100  # whatever a machine lacks
        pytest.skip(f"no compiler: {cause}")
    scope = ("embedding", "attn", "mlp", "head", "loss")
    eager, captured = (Pipeline(Sequential(), 2, scope=scope, executor="native") for _ in range(2))
    eager.step(1), captured.step(1)
    captured.start_capture()
    for number in (2, 3):
        assert eager.step(number).equals(captured.step(number))


class Compiler:
    """In the compiler's place: takes a while, and fails where ``error`` is given."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error
        self.folders: list[Path] = []

    def __call__(self, library: Path) -> None:
        folder = library.parent
        self.folders.append(folder)
        (folder / "lock").touch()
        time.sleep(0.1)
        if self._error is not None:
            raise self._error
        library.write_text(str(folder))
        (folder / "lock").unlink()


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the extension is kept; what is loaded from there is its folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_load", lambda folder: SimpleNamespace(folder=folder))
    return tmp_path / "megatron-run" / "tapes"


def test_one_rank_compiles_and_the_others_wait_for_its_result(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler()
    monkeypatch.setattr(native, "_call_compiler", compiler)
    with ThreadPoolExecutor(3) as ranks:
        assert all(ranks.map(lambda _: native.build(LOG, no_heartbeat), range(3)))
    assert len(compiler.folders) == 1
    (home,) = (path for path in kept.iterdir() if path.is_dir())
    assert [path.name for path in home.iterdir()] == ["megatron_run_tape.so"]
    native.build(LOG, no_heartbeat)
    assert len(compiler.folders) == 1


@pytest.mark.parametrize("error", [RuntimeError("no compiler"), KeyboardInterrupt()], ids=["failed", "interrupted"])
def test_a_compilation_that_does_not_end_leaves_nothing_to_wait_for(
    error: BaseException, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_call_compiler", Compiler(error))
    with pytest.raises(type(error)):
        native.build(LOG, no_heartbeat)
    assert not [path for path in kept.iterdir() if path.is_dir()]
    killed = native._home().with_name(temporary_name(native._home().name))
    killed.mkdir()
    monkeypatch.setattr(native, "_call_compiler", Compiler())
    native.build(LOG, no_heartbeat)
    assert [path for path in kept.iterdir() if path.is_dir()] == [native._home()]


def test_a_rank_that_compiles_says_so_and_gives_signs_of_life(
    kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beats: list[int] = []
    monkeypatch.setattr(native, "_call_compiler", Compiler())
    monkeypatch.setattr(native, "_BEAT", 0.01)
    with caplog.at_level(logging.WARNING):
        native.build(LOG, lambda: beats.append(len(caplog.messages)))
    assert len(beats) > 2
    assert set(beats) == {1}
    told = len(beats)
    native.build(LOG, lambda: beats.append(1))
    assert (len(beats), len(caplog.messages)) == (told, 1)


@pytest.mark.multiproc
def test_the_compiler_ends_with_the_rank_that_called_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is ended by a signal to its process group, as at a second Ctrl-C."""
    compiler, called = tmp_path / "compiler", tmp_path / "called"
    compiler.write_text(f"#!/bin/sh\necho $$ > {called}.new\nmv {called}.new {called}\nexec sleep 300\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    (tmp_path / "calling.py").write_text(
        f"from pathlib import Path\nfrom {native.__name__} import _call_compiler\n\n\n"
        "def program():\n    _call_compiler(Path('x.so'))\n"
    )
    with ForkedCommand((), tmp_path, program="calling:program") as rank:  # which has a group of its own
        wait_until(called.exists, 50)
        os.killpg(rank.pid, signal.SIGKILL)
    wait_until(lambda: not alive(int(called.read_text())))


def test_what_the_compiler_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "sh -c 'echo no such header >&2; exit 3'")
    with pytest.raises(RuntimeError, match="ended with 3: no such header"):
        native._call_compiler(tmp_path / "x.so")


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_nothing_is_executed_that_another_user_could_have_put_there(kept: Path, mode: int) -> None:
    assert native._home().parent == kept
    cache = kept.parent
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    cache.chmod(mode)
    with pytest.raises(PermissionError):
        native.build(LOG, no_heartbeat)
    kept.rmdir()
    cache.rmdir()
    (cache.parent / "elsewhere").mkdir(mode=0o700)
    cache.symlink_to(cache.parent / "elsewhere")
    with pytest.raises(PermissionError):
        native.build(LOG, no_heartbeat)


def test_what_was_compiled_for_another_torch_is_not_taken(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = native._home()
    assert home.parent == kept
    assert native._home() == home
    monkeypatch.setattr(torch, "__version__", "1.0")
    assert native._home() != home


def test_without_a_compiler_python_replays_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("Error building extension\nand much more")

    monkeypatch.setattr(native, "build", fail)
    with caplog.at_level(logging.WARNING):
        assert find_executor("native", LOG, no_heartbeat) is in_python
    assert caplog.messages == ["the native executor of tapes cannot be built, Python replays: Error building extension"]


def test_operations_write_to_their_places_where_there_is_such_a_form() -> None:
    aten = torch.ops.aten
    assert out_form(aten.mm.default) == (aten.mm.out, ("out",))
    assert out_form(aten.native_layer_norm.default) == (aten.native_layer_norm.out, ("out0", "out1", "out2"))
    assert out_form(aten.detach.default) is None

"""The executor in C++ where it can be built, and Python in its place where it cannot."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from megatron_run.builtin.schedule.sequential import Sequential
from megatron_run_graph_capture_partial import native
from megatron_run_graph_capture_partial.executors import in_python, out_form
from megatron_run_graph_capture_partial.selection import find_executor
from tests.plugins.graph_bench import Pipeline


@pytest.mark.slow  # a minute where it was never built; then it is kept
def test_the_native_executor_leaves_the_bits_of_eager_steps() -> None:
    try:
        native.build()
    except Exception as cause:  # noqa: BLE001 RUF100  # whatever a machine lacks
        pytest.skip(f"no compiler: {cause}")
    scope = ("embedding", "attn", "mlp", "head", "loss")
    eager, captured = (Pipeline(Sequential(), 2, scope=scope, executor="native") for _ in range(2))
    eager.step(1), captured.step(1)
    captured.start_capture()
    for number in (2, 3):
        assert eager.step(number).equals(captured.step(number))


class Compiler:
    """In the place of torch's ``load``; waits until ``together`` are at it, and fails where ``error`` is given."""

    def __init__(self, together: int = 1, error: BaseException | None = None) -> None:
        self._barrier, self._error = Barrier(together, timeout=10), error
        self.folders: list[Path] = []

    def __call__(self, name: str, sources: list[str], *, build_directory: str, **_: Any) -> str:
        folder = Path(build_directory)
        assert not (folder / "lock").exists()
        (folder / "lock").touch()
        (folder / f"{name}.so").write_text(build_directory)
        self.folders.append(folder)
        self._barrier.wait()
        if self._error is not None:
            raise self._error
        (folder / "lock").unlink()
        return name


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where extensions are kept, with what a compilation that was killed leaves in torch's own folder for this one."""
    (tmp_path / "megatron_run_tape").mkdir()
    (tmp_path / "megatron_run_tape" / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(native, "_module", native._module.__wrapped__)  # without its memory
    return tmp_path


def test_ranks_compile_at_once_and_one_result_is_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(together=3)
    monkeypatch.setattr(cpp_extension, "load", compiler)
    with ThreadPoolExecutor(3) as ranks:
        assert [*ranks.map(lambda _: native._module(), range(3))] == 3 * ["megatron_run_tape"]
    assert len({*compiler.folders}) == 3
    (home,) = set(kept.iterdir()) - {kept / "megatron_run_tape"}
    assert [path.name for path in home.iterdir()] == ["megatron_run_tape.so"]
    monkeypatch.setattr(native, "_load", lambda folder: f"loaded from {folder}")
    assert native._module() == f"loaded from {home}"
    assert len(compiler.folders) == 3


@pytest.mark.parametrize("error", [RuntimeError("no compiler"), KeyboardInterrupt()], ids=["failed", "interrupted"])
def test_a_compilation_that_does_not_end_leaves_nothing_to_wait_for(
    error: BaseException, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp_extension, "load", Compiler(error=error))
    with pytest.raises(type(error)):
        native._module()
    assert [*kept.iterdir()] == [kept / "megatron_run_tape"]
    monkeypatch.setattr(cpp_extension, "load", Compiler())
    assert native._module() == "megatron_run_tape"


def test_what_was_compiled_for_another_torch_is_not_taken(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = native._home()
    assert home.parent == kept
    assert native._home() == home
    monkeypatch.setattr(torch, "__version__", "1.0")
    assert native._home() != home


def test_without_a_compiler_python_replays_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Any:
        raise RuntimeError("Error building extension\nand much more")

    monkeypatch.setattr(native, "_module", fail)
    with caplog.at_level(logging.WARNING):
        assert find_executor("native", logging.getLogger("megatron_run")) is in_python
    assert caplog.messages == ["the native executor of tapes cannot be built, Python replays: Error building extension"]


def test_operations_write_to_their_places_where_there_is_such_a_form() -> None:
    aten = torch.ops.aten
    assert out_form(aten.mm.default) == (aten.mm.out, ("out",))
    assert out_form(aten.native_layer_norm.default) == (aten.native_layer_norm.out, ("out0", "out1", "out2"))
    assert out_form(aten.detach.default) is None

"""The words of errors: how their parts are joined, and the nearest values that would do."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from megatron_run.errors import (
    ENGINE,
    ExitCode,
    InputError,
    PluginError,
    Problems,
    advice,
    did_you_mean,
    how_to_install,
    locate,
    near_path,
    nearest_divisors,
    nearest_multiples,
    printable,
    system_limit,
)
from tests.support.checkout import ROOT


def test_the_same_command_may_succeed_after_what_came_from_outside() -> None:
    """Scripts that resubmit jobs go by it."""
    assert [int(code) for code in ExitCode if code.retry] == [4, 75, 143]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            OSError(errno.EMFILE, "Too many open files"),
            2,
            r"too many files are open: ulimit -n allows \d+; .*ulimit -n 4096",
        ),
        (OSError(errno.ENFILE, "Too many open files in system"), 2, "too many files are open"),
        (RuntimeError("[enforce fail at socket.cc:24] socket: Too many open files"), 2, "too many files are open"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), 2, "too many processes or threads run"),
        (RuntimeError("can't start new thread"), 2, "allow more: ulimit -u 4096"),
        (RuntimeError("Resource temporarily unavailable"), 2, "allow more: ulimit -u 4096"),  # torch's threads
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 7, "the host ran out of memory"),
        (MemoryError(), 7, "the host ran out of memory; free"),
        (
            MemoryError("Unable to allocate 8 TiB for an array"),
            7,
            "the host ran out of memory: Unable to allocate 8 TiB",
        ),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 80 bytes.\nC++"
            ),
            7,
            r"the host ran out of memory: .* tried to allocate 80 bytes\.; free",
        ),
        (
            RuntimeError("NCCL error\nLast error:\nCall to ibv_create_cq failed with error Cannot allocate memory"),
            2,
            "the network may lock too little memory: Call to ibv_create_cq .*; allow more: ulimit -l unlimited",
        ),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "a" * 300),
            2,
            "a name is too long for a file: a{200}[.]{3}$",
        ),
    ],
)
def test_what_the_machine_refuses_is_a_line_that_says_what_to_allow(error: Exception, code: int, line: str) -> None:
    known = system_limit(error)
    assert known is not None
    assert known.exit_code == code
    assert re.match(f".*{line}", str(known))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOENT, "No such file"),
        RuntimeError("a plugin's own: Cannot allocate memory"),
        ValueError("DefaultCPUAllocator"),
    ],
)
def test_any_other_error_is_no_limit(error: Exception) -> None:
    assert system_limit(error) is None


def test_an_error_is_one_line_of_what_why_origin_and_fix() -> None:
    assert str(InputError("no", why="because", origin="--set a.b", fix="do")) == "no: because (from --set a.b); do"
    assert str(InputError("no", fix="do")) == "no; do"


def test_a_name_that_others_chose_neither_reaches_the_terminal_nor_begins_a_line() -> None:
    """Tensors, files and messages in what was downloaded: a title, a cleared screen, a line that looks like ours."""
    forged = "h.\x1b]0;mine\x07\x1b[2J\r\nmegatron-run: all is well\u202e\udc80\x85"
    line = str(InputError("no", why=forged, origin=forged, fix=f"do{forged}"))
    assert line.isprintable()
    assert "h.\\x1b]0;mine\\x07" in line
    assert printable("what differs\n  a: 1\n  b: \x07é") == "what differs\n  a: 1\n  b: \\x07é"
    assert str(Problems([InputError(forged), InputError("b")])).count("\n") == 1


def test_an_exception_is_told_where_it_was_raised() -> None:
    bug, mine, foreign = ValueError("x"), PluginError("a"), PluginError("b", origin="data.paths")
    for error in (bug, mine, foreign):
        locate(error, "rank 1, action 2, F1.0")
    assert bug.__notes__ == ["rank 1, action 2, F1.0"]
    assert str(mine) == "a (from rank 1, action 2, F1.0)"
    assert str(foreign) == "b (from data.paths, rank 1, action 2, F1.0)"


def test_several_problems_are_a_line_each_and_end_with_the_code_of_the_first() -> None:
    problems = Problems([PluginError("a"), InputError("b")])
    assert (str(problems), problems.exit_code) == ("a\nb", 3)
    with pytest.raises(ValueError, match="at least one"):
        Problems([])


def test_a_file_that_is_something_else_does_not_fill_the_screen() -> None:
    lines = str(Problems([InputError(f"mistake {number}") for number in range(25)])).splitlines()
    assert lines == [*(f"mistake {number}" for number in range(20)), "and 5 more mistakes"]
    assert str(Problems([InputError("a")] * 20)).splitlines() == ["a"] * 20


def test_the_part_of_a_path_that_is_missing_is_compared_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    assert near_path(tmp_path / "runs" / "lastest") == "did you mean 'latest'?"
    assert near_path(tmp_path / "run" / "latest") == "did you mean 'runs'?"
    assert near_path(tmp_path / "runs" / "latest") == ""
    assert near_path(tmp_path / "runs" / "zzz") == ""
    (tmp_path / "runs" / "gone").symlink_to("nowhere")
    assert (near_path(tmp_path / "runs" / "gone"), near_path(tmp_path / "runs" / "gnoe")) == ("", ""), "not itself"
    for name in ("list.yaml", "unknown.yaml"):
        (tmp_path / name).touch()
    assert (near_path(tmp_path / "missng.yaml"), near_path(tmp_path / "none.yaml")) == ("", ""), "endings do not count"
    assert near_path(tmp_path / "lists.yml") == "did you mean 'list.yaml'?"


def test_advice_reads_on_after_a_question() -> None:
    assert advice(did_you_mean("interleavd", ["1f1b", "interleaved"]), "installed: 1f1b, interleaved") == (
        "did you mean 'interleaved'? installed: 1f1b, interleaved"
    )
    assert advice(did_you_mean("zzz", ["1f1b"]), "installed: 1f1b") == "installed: 1f1b"
    assert advice("pip install it", "", "installed: 1f1b") == "pip install it; installed: 1f1b"


@pytest.mark.parametrize("number", range(1, 40))
def test_the_nearest_values_are_those_of_a_search(number: int) -> None:
    for other in range(1, 40):
        values = range(1, 100)
        if number % other:
            multiples = [value for value in values if value % other == 0]
            below = [value for value in multiples if value < number][-1:]
            above = [value for value in multiples if value > number][:1]
            assert nearest_multiples(number, other) == " or ".join(map(str, below + above))
            divisors = [value for value in values if number % value == 0]
            nearest = [max(value for value in divisors if value < other)]
            nearest += [value for value in divisors if value > other][:1]
            assert nearest_divisors(number, other) == " or ".join(map(str, nearest))


def test_a_kernel_of_a_checkout_says_how_to_install_from_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert how_to_install(ENGINE) == "pip install -e ./core/engine"
    assert how_to_install("megatron-run-parallel-layer-tensor") == "pip install -e ./plugins/parallel-layer/tensor"
    monkeypatch.chdir(tmp_path)
    assert how_to_install(ENGINE) == f"pip install -e {ROOT}/core/engine"


def test_an_installed_kernel_says_how_to_install_from_an_index(tmp_path: Path) -> None:
    installed = tmp_path / "lib/python3.12/site-packages/megatron_run/errors.py"
    assert how_to_install("megatron-run-observer-tensorboard", installed) == (
        "pip install megatron-run-observer-tensorboard"
    )


def test_a_plugin_is_installed_together_with_the_engine_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a checkout pip would look for the engine on an index, which need not have it."""
    for folder, needs in (("core/engine", "megatron-run-core"), ("plugins/scaler/dynamic", ENGINE)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "pyproject.toml").write_text(f'dependencies = ["{needs}==1"]')
    monkeypatch.setattr("megatron_run.errors.find_spec", lambda _: None)
    kernel = tmp_path / "core/kernel/src/megatron_run/errors.py"
    asked = how_to_install("megatron-run-scaler-dynamic", kernel)
    assert asked == f"pip install -e {tmp_path}/core/engine -e {tmp_path}/plugins/scaler/dynamic"


def test_a_message_brings_a_terminal_nothing_but_text_and_tables() -> None:
    assert str(InputError("a\x1b[2J\nmegatron-run: done\r", why="\ud800 \u202e")) == (
        "a\\x1b[2J\\nmegatron-run: done\\r: \\ud800 \\u202e"
    )
    assert str(InputError("these differ\n  rank 0: x\n  rank 1: y")) == "these differ\n  rank 0: x\n  rank 1: y"
    assert str(InputError("é 漢字")) == "é 漢字"


def test_a_word_of_absurd_length_is_compared_with_none() -> None:
    assert did_you_mean("a" * 100_000, ["a" * 99_999]) == ""
    assert did_you_mean("interleavd", ["a" * 100_000, "interleaved"]) == "did you mean 'interleaved'?"

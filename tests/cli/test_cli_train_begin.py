"""What a training says before its ranks start: at once what it does, and when it is ended that nothing was saved."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from megatron_run.errors import ExitCode, RunError
from megatron_run_cli.commands.train import ANNOUNCED
from megatron_run_cli.main import main
from megatron_run_cli.termination import Terminated
from tests.support.commands import world_of_two

Output = pytest.CaptureFixture[str]
SAID = f"megatron-run: {ANNOUNCED}\n"


class Resolving:
    """Stands for what resolves a run: what was said by then, and how it ends."""

    def __init__(self, said: Callable[[], str], end: BaseException) -> None:
        self.said, self.end = said, end
        self.before = ""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        self.before = self.said()
        raise self.end


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("more", "line"), [((), SAID), (("--quiet",), ""), (("--json",), "")])
def test_it_says_what_it_does_before_it_loads_anything(
    more: tuple[str, ...], line: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving = Resolving(lambda: capsys.readouterr().err, RunError("the end"))
    monkeypatch.setattr("megatron_run.planning.resolve", resolving)
    assert main(["preset:tiny", *more]) == ExitCode.INPUT
    assert resolving.before == line


def test_a_launcher_that_did_not_start_it_is_told_alone(capsys: Output) -> None:
    assert main(["--launch", "torchrun", "preset:tiny"]) == ExitCode.INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert "this process was not started by torchrun" in line


def test_a_misspelt_key_is_told_alone(capsys: Output) -> None:
    assert main(["preset:tiny", "--set", "train.stepz=3"]) == ExitCode.INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-run: unknown key train.stepz")


@pytest.mark.parametrize(
    ("end", "code", "word"),
    [(KeyboardInterrupt(), ExitCode.SIGINT, "interrupted"), (Terminated(15), ExitCode.SIGTERM, "stopped by SIGTERM")],
)
def test_who_ends_it_reads_that_nothing_was_saved(
    end: BaseException, code: ExitCode, word: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_run.planning.resolve", Resolving(str, end))
    assert main(["preset:tiny"]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"megatron-run: {word}; no step has begun, and nothing was saved"


@pytest.mark.parametrize(("rank", "line"), [("0", SAID), ("1", "")])
def test_of_the_ranks_of_a_job_the_first_says_it(
    rank: str, line: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_run_engine.launch.launch", Resolving(str, RunError("the end")), raising=False)
    for name, value in world_of_two(int(rank), 1).items():
        monkeypatch.setenv(name, value)
    assert main(["preset:tiny"]) == ExitCode.INPUT
    assert capsys.readouterr().err == f"{line}megatron-run: the end\n"

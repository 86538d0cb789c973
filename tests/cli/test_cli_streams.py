"""Streams that are closed or full, and a folder that is gone: one line or silence, and never another's file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_run_cli.__main__ import program
from megatron_run_cli.main import main
from tests.support.forked import TINY, forked_command

_FULL = (
    "megatron-run: standard output cannot be written: No space left on device; "
    "files that the command had written are whole; send what it prints elsewhere\n"
)
_GONE = "megatron-run: the current folder was removed; cd to one that exists"


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("exec {} >&-", 0, ""),
        ("exec {} <&- >&- 2>&-", 0, ""),
        ("exec {} > /dev/full", 5, _FULL),
        ("exec {} > /dev/full 2> /dev/full", 5, ""),
        ('mkdir gone && cd gone && rmdir "$PWD" && exec {}', 2, _GONE),
    ],
)
def test_a_command_ends_in_one_line_or_in_silence(shell: str, code: int, said: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -P -m megatron_run_cli plugins list schedule"
    ran = subprocess.run(
        ["/bin/bash", "-c", shell.format(command)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (code, "")
    assert ran.stderr.startswith(said)
    assert ran.stderr.count("\n") == bool(said)


@pytest.mark.parametrize("words", ["plugins list", "schedule show --plugin schedule=1f1b --stages 2 --microbatches 3"])
def test_a_full_output_is_told_once_and_by_its_name(words: str, tmp_path: Path) -> None:
    command = f"exec {sys.executable} -P -m megatron_run_cli {words} > /dev/full"
    ran = subprocess.run(["/bin/bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (5, _FULL)


def into_a_full_device() -> None:
    """The command, whose output is one on which nothing can be written."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    program()


@pytest.mark.multiproc
def test_a_training_goes_on_without_an_output_and_says_where_it_prints(tmp_path: Path) -> None:
    sets = " ".join(f"--set {key}={value}" for key, value in TINY.items() if key != "observer.use")
    words = f"preset:tiny {sets} --set run.folder=out".split()
    ran = forked_command(words, tmp_path, program=f"{__name__}:{into_a_full_device.__name__}")
    said = [line for line in ran.stderr.splitlines() if "standard output" in line]
    assert (ran.returncode, len(said)) == (0, 1), ran.stderr
    log = Path(said[0].partition("the run goes on, and prints into ")[2])
    assert "4/4" in log.read_text() or "step 4" in log.read_text(), log.read_text()


def test_what_is_printed_does_not_enter_a_file_that_took_the_place_of_the_output(tmp_path: Path) -> None:
    words = "schedule show --plugin schedule=1f1b --stages 2 --microbatches 2 --svg a.svg"
    command = f"exec {sys.executable} -P -m megatron_run_cli {words} <&- >&- 2>&-"
    assert subprocess.run(["/bin/bash", "-c", command], cwd=tmp_path, check=False).returncode == 0
    text = (tmp_path / "a.svg").read_text()
    assert text.startswith("<svg")
    assert text.rstrip().endswith("</svg>")


def test_a_disk_that_is_full_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/data/file")

    monkeypatch.setattr("megatron_run_cli.main.program.main", full)
    assert main(["doctor"]) == 5
    assert capsys.readouterr().err == (
        "megatron-run: /data/file cannot be written: No space left on device; "
        "make room there, and run the same command again\n"
    )

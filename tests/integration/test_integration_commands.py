"""Every command is in the campaign against commands, and a part of that finds nothing wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_run.errors import ExitCode
from megatron_run_cli.main import main
from tests.campaigns.commands import COMMANDS, WRITERS, leaves, make_inputs
from tests.campaigns.written import Place, Trials

pytestmark = pytest.mark.timeout(120)
#: Quick ones, of each kind of output: a new folder, files that belong together, and pictures that do not.
SOME = ("plugins new", "data clean", "import", "schedule show")


def test_every_command_is_in_the_campaign() -> None:
    """A new one says in ``tests.campaigns.commands`` what it writes; from then on it is killed there."""
    assert sorted(leaves()) == sorted(COMMANDS)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands") / "inputs"
    make_inputs(folder)
    return folder


#: Who writes what a run can be continued in, or what nobody edits: pictures and the schema are made anew unasked.
AGAIN = {"train", "finetune", "schedule show", "config schema"}
_TAKEN = re.compile(
    r"megatron-run: .+ exists(: nothing is overwritten; name a new folder|; name another \S+, or add .+)"
)


@pytest.mark.parametrize("command", sorted(set(WRITERS) - AGAIN))
def test_no_command_replaces_what_is_there_unasked(
    command: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(tmp_path / "place", COMMANDS[command], inputs)
    monkeypatch.chdir(place.work)
    words = COMMANDS[command].typed(command)
    assert main(words) == 0
    made = place.made
    capsys.readouterr()
    assert main(words) == ExitCode.INPUT
    (line,) = capsys.readouterr().err.splitlines()
    said = _TAKEN.fullmatch(line)
    assert said, line
    assert place.made == made
    assert not said[1].endswith("--overwrite") or main([*words, "--overwrite"]) == 0


@pytest.mark.multiproc
@pytest.mark.parametrize(("turn", "command"), list(enumerate(SOME)), ids=SOME)
def test_a_command_that_is_disturbed_leaves_all_or_nothing(
    turn: int, command: str, inputs: Path, tmp_path: Path
) -> None:
    """Each disturbance befalls each command, early, in the middle or late; all commands have each at each place."""
    trials = Trials(command, inputs, tmp_path)
    assert trials.changes > 5, "else nothing is seen"
    places = (2, trials.changes // 2, trials.changes - 1)
    for number, how in enumerate(("SIGKILL", "full", "SIGTERM")):
        assert trials.trial(how, places[(number + turn) % len(places)]) == []

"""Every command that writes, disturbed at every change of the disk: what it writes is whole or not there.

The commands are those of ``megatron-run`` itself, so that a new one is in, or a test fails. Each is killed, finds its
disk full, is told to end; afterwards the same command gives what it would have given undisturbed.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.commands import COMMANDS, WRITERS, Case, make_inputs, place_inputs
from tests.campaigns.disturbed import AT, BELOW, COUNT, HOW
from tests.campaigns.figures import Figures, campaign, some
from tests.support.forked import forked_command, learned
from tests.support.processes import wait_until

#: Exit codes for scripts, without that of a bug.
CODES = (0, 2, 3, 4, 5, 6, 7, 75, 130, 143)
_PROGRAM = "tests.campaigns.disturbed:program"
#: A signal, by the code of a command that it ends.
SIGNALS = {"SIGINT": 130, "SIGTERM": 143}


@dataclass(frozen=True)
class Ran:
    """How a command ended: its code, its lines, and how often it changed the disk."""

    code: int
    said: str
    changes: int

    @property
    def faults(self) -> list[str]:
        """What no command may say or end with."""
        faults = [f"a traceback: {self.said.strip()[-300:]}"] if "Traceback" in self.said else []
        return faults + ([f"exit code {self.code}: {self.said.strip()[-300:]}"] if self.code not in CODES else [])


class Place:
    """A folder in which one command is typed, with what it needs; its cache and its temporary folder lie beside it."""

    def __init__(self, folder: Path, case: Case, inputs: Path) -> None:
        self.folder, self.work = folder, folder / "work"
        for name in ("work", "cache", "tmp"):
            (folder / name).mkdir(parents=True)
        place_inputs(case, inputs, self.work)
        self._given = set(self.tree())
        self.variables = {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}

    def tree(self) -> dict[str, bytes | None]:
        """All below, with contents; None for folders."""
        return {
            str(path.relative_to(self.work)): path.read_bytes() if path.is_file() else None
            for path in sorted(self.work.rglob("*"))
        }

    def temporary(self) -> list[str]:
        """What stays in the temporary folder, also once the watchers of ranks have had time to tidy up."""
        with suppress(AssertionError):
            wait_until(lambda: not any((self.folder / "tmp").iterdir()), 30.0)
        return [path.name for path in (self.folder / "tmp").iterdir()]

    @property
    def made(self) -> dict[str, bytes | None]:
        """What was not given."""
        return {name: content for name, content in self.tree().items() if name not in self._given}

    def run(self, words: Sequence[str], how: str = "", at: int = 0) -> Ran:
        """Type the command, which ``how`` befalls before its change number ``at``, counted from 1."""
        count = self.folder / "count"
        count.unlink(missing_ok=True)
        told = {HOW: how, AT: str(at), BELOW: str(self.folder), COUNT: str(count), **self.variables}
        ran = forked_command(words, self.work, program=_PROGRAM, variables=told, timeout=120)
        return Ran(ran.returncode, ran.stderr, int(count.read_text() or "0"))


class Trials:
    """``command`` in places below ``folder``, compared with what it gives twice undisturbed."""

    def __init__(self, command: str, inputs: Path, folder: Path) -> None:
        self._case, self._inputs, self._folder = COMMANDS[command], inputs, folder
        self.words, self.command = self._case.typed(command), command
        first, second = self._undisturbed("first"), self._undisturbed("second")
        self.changes = first[0].changes
        self._whole = {name: content if second[1].get(name) == content else None for name, content in first[1].items()}

    def _undisturbed(self, name: str) -> tuple[Ran, dict[str, bytes | None]]:
        place = self.place(name)
        ran, made = place.run(self.words), self._made(place)
        assert ran.code == 0, f"{self.command}: {ran.said}"
        shutil.rmtree(place.folder)
        return ran, made

    def place(self, name: str) -> Place:
        """A new place for this command."""
        return Place(self._folder / name, self._case, self._inputs)

    def _made(self, place: Place) -> dict[str, bytes | None]:
        """What was not given. A run folder stands for its metrics: each attempt keeps records of its own there."""
        made, run = place.made, self._case.goes_on
        if run not in self._case.writes or run not in made:
            return made
        left = {name: None for name in made if name.split("/")[-1].startswith(".") and not name.endswith("/.lock")}
        return {**left, run: repr(learned(place.work / run)).encode()}

    def differences(self, made: Mapping[str, bytes | None], wanted: Sequence[str] | None = None) -> list[str]:
        """How ``made`` is not what is made undisturbed; of contents that differ each time, that they are there.

        Only names below the ``wanted`` are missed.
        """
        whole = [name for name in self._whole if wanted is None or name.split("/")[0] in wanted]
        faults = [f"{name} is missing" for name in whole if name not in made]
        faults += [f"{name} is left" for name in made if name not in self._whole]
        another = [name for name in made if self._whole.get(name) not in (None, made[name])]
        return faults + [f"{name} is another" for name in another]

    def trial(self, how: str, at: int) -> list[str]:
        """What is wrong when ``how`` befalls the command before its change ``at``, and when it is typed again."""
        place = self.place(f"{how}-{at}")
        ran = place.run(self.words, how, at)
        faults = self._after(how, ran, place)
        again, made = place.run(self.words), self._made(place)
        done = again.code == 2 and set(self._case.writes) <= made.keys()  # it says how to do it once more
        if again.code and not done:
            faults.append(f"again: exit code {again.code}: {again.said.strip()[-200:]}")
        faults += [f"again: {fault}" for fault in self.differences(made) if not (done and fault.endswith("is left"))]
        shutil.rmtree(place.folder)
        return [f"{self.command}, {how} at {at} of {self.changes}: {'; '.join(faults)}"] if faults else []

    def _after(self, how: str, ran: Ran, place: Place) -> list[str]:
        """What is wrong once ``how`` has befallen the command: how it ended, what is torn, what is left."""
        goes_on, made = self._case.goes_on, self._made(place)
        made = {name: content for name, content in made.items() if not goes_on or name.split("/")[0] != goes_on}
        there = [name for name in self._case.writes if name in made]
        if how == "SIGKILL":
            faults = [] if ran.code in (-9, 0) else [f"exit code {ran.code}"]
            return faults + [fault for fault in self.differences(made, there) if not fault.endswith("is left")]
        faults = ran.faults
        faults += [f"exit code {ran.code}"] if how in SIGNALS and ran.code not in (0, SIGNALS[how]) else []
        lines = [line for line in ran.said.splitlines() if line.startswith("megatron-run: ")]
        faults += [f"{len(lines)} lines: {lines}"] if ran.code and len(lines) != 1 else []
        faults += [f"{left} is left" for left in place.temporary()]
        all_or_none = self._case.writes if there and self._case.together else there
        return faults + self.differences(made, all_or_none)


def disturbed(folder: Path, seed: int, jobs: int, share: float) -> Iterator[Figures]:
    """A row for each kind of disturbance."""
    make_inputs(folder / "inputs")
    trials = [Trials(command, folder / "inputs", folder / command.replace(" ", "-")) for command in WRITERS]
    points = [(each, at) for each in trials for at in range(1, each.changes + 1)]
    for how, what in (
        ("SIGKILL", "a command killed before a change of the disk: no torso; again, it gives the same"),
        ("full", "a disk that is full from a change on: one line, all outputs or none; with room, the same"),
        *(
            (name, f"{name} at a change of the disk: one line, code {code}; again, the same")
            for name, code in SIGNALS.items()
        ),
    ):
        chosen = random.Random(seed).sample(points, min(len(points), 5 * len(trials))) if how in SIGNALS else points

        def trial(index: int, how: str = how, chosen: Sequence[tuple[Trials, int]] = tuple(chosen)) -> Sequence[str]:
            each, at = chosen[index]
            return each.trial(how, at)

        figures = campaign(what, trial, some(len(chosen), share), jobs)
        figures.notes.append(f"{len(trials)} commands, {len(points)} changes")
        yield figures

"""Wherever saving stops, by a kill or a loss of power, nothing that was committed is lost; the next save goes on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from pathlib import Path

import pytest

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.manifest import MANIFEST
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from tests.support.crashes import Change, RecordingFileSystem, Tree, ends, materialise
from tests.support.saved_steps import State, async_saver, random_state, read_all, same_state, save_alone, save_async

Rebuild = Callable[[Tree], Checkpoints]
#: The one fault that must never be: the others are at least seen.
FALSE = "a step was read that is not what was saved"
#: A first save, one beside it, and one that removes the first; at night also a fourth, which does what the third does.
STEPS = [(10, 20, 30), pytest.param((10, 20, 30, 40), marks=pytest.mark.nightly)]
KEEP = 2


@cache
def state(step: int) -> State:
    return random_state(step, tensors=1)


class Recorded:
    """All changes of saving ``steps`` one after the other, and how many had been made when each save returned."""

    def __init__(self, path: Path, steps: tuple[int, ...]) -> None:
        files = RecordingFileSystem(path)
        self.steps, self.returned = steps, dict[int, int]()
        for step in steps:
            save_alone(path / "checkpoints", step, state(step), files=files, keep=KEEP)
            self.returned[step] = len(files.changes)
        self.changes: Sequence[Change] = tuple(files.changes)

    def committed(self, done: int) -> list[int]:
        """The steps whose save had returned after ``done`` changes."""
        return [step for step, at in self.returned.items() if at <= done]

    def allowed(self, done: int) -> set[int | None]:
        """What may be the newest step: the last that returned, or the one that was being saved."""
        saved = self.committed(done)
        return {saved[-1] if saved else None, self.steps[min(len(saved), len(self.steps) - 1)]}


@pytest.fixture(scope="module", params=STEPS, ids=lambda steps: f"{len(steps)} steps")
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("recorded"), request.param)


@pytest.fixture
def rebuilt(tmp_path: Path) -> Rebuild:
    """Makes a folder of its own for each tree."""
    numbers = count()

    def build(tree: Tree) -> Checkpoints:
        path = tmp_path / str(next(numbers))
        materialise(tree, path)
        return Checkpoints(path / "checkpoints")

    return build


def fault(found: Checkpoints, recorded: Recorded, done: int) -> str:
    """How the promise is broken by what was found after ``done`` changes; empty when it is kept."""
    committed = recorded.committed(done)
    try:
        newest = found.newest()
        if newest not in recorded.allowed(done):
            return f"the newest step is {newest}"
        whole = [step for step in found.steps() if same_state(read_all(found, step), state(step))]
    except CheckpointError as error:
        return str(error)
    if whole != found.steps():
        return FALSE
    if len(whole) < min(KEEP, len(committed)):
        return f"of {committed} only {whole} are left"
    if committed and found.hint() not in recorded.allowed(done):
        return f"latest says {found.hint()}"
    return ""


def test_whatever_stops_it_the_promise_is_kept(recorded: Recorded, rebuilt: Rebuild) -> None:
    for done, how, tree in ends(recorded.changes):
        broken = fault(rebuilt(tree), recorded, done)
        assert not broken, f"{how} after {done} changes, before {recorded.changes[done:][:1]}"


def test_after_any_end_the_next_save_goes_on_and_clears_what_was_left(recorded: Recorded, rebuilt: Rebuild) -> None:
    for done, how, tree in ends(recorded.changes):
        path = rebuilt(tree).path
        path.parent.mkdir(exist_ok=True)
        found = save_alone(path, 50, state(50), files=RecordingFileSystem(path.parent), keep=KEEP)
        assert same_state(read_all(found, 50), state(50)), (done, how)
        assert found.hint() == found.newest() == 50
        left = {entry.name for entry in path.iterdir()} - {".lock", "latest"}
        assert left == {f"step{step}" for step in found.steps()}, (done, how)


def test_saving_in_the_background_makes_the_same_changes_in_the_same_order(recorded: Recorded, tmp_path: Path) -> None:
    """So it can be stopped at the same points, and what was found of each holds for it too."""
    files = RecordingFileSystem(tmp_path)
    saver = async_saver(tmp_path / "checkpoints", files=files, keep=KEEP)
    for step in recorded.steps:
        save_async(saver, step, state(step))
        saver.wait()
    assert list(map(without_manifest, files.changes)) == list(map(without_manifest, recorded.changes))


def without_manifest(change: Change) -> Change:
    """A manifest may name the boxes in any order, which its SHA-256 shows: of it the length only."""
    return change._replace(data=bytes(len(change.data))) if change.path.name == MANIFEST else change


def made_lasting(changes: Sequence[Change], sync: int) -> str:
    """What the sync of this index is for: the change before it, without the numbers of steps."""
    before = changes[sync - 1]
    return re.sub("[0-9]+", "", f"{before.call} {before.path.name}")


def test_each_sync_is_needed_and_without_it_nothing_false_is_read_in_silence(
    recorded: Recorded, rebuilt: Rebuild
) -> None:
    changes = recorded.changes[: recorded.returned[30]]
    needed: dict[str, bool] = {}
    for dropped in (index for index, change in enumerate(changes) if "sync" in change.call):
        after = ((done, tree) for done, _, tree in ends(changes, dropped) if done > dropped)
        faults = (fault(rebuilt(tree), recorded, done) for done, tree in after)
        found = next(filter(None, faults), "")
        assert found != FALSE, f"without {dropped}: {changes[dropped]}"
        purpose = made_lasting(changes, dropped)
        needed[purpose] = needed.get(purpose, False) or bool(found)
    assert len(needed) == 8
    assert all(needed.values()), needed

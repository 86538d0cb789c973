"""Starting from weights that another run or an import left (``run.init_from``): the weights, and nothing else of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_run.contracts.state import MASTER
from megatron_run_engine.checkpoint.collectives import on_all_ranks, on_rank0
from megatron_run_engine.checkpoint.reader import Reader
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.training.state.init_source import choose_source, differing_options, refuse_other_model
from megatron_run_engine.training.state.resuming import load, verify_share

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.checkpoint.collectives import Ranks
    from megatron_run_engine.checkpoint.manifest import Manifest
    from megatron_run_engine.training.build import Assembly

Shapes = Mapping[str, tuple[int, ...]]


def start_from(run: ResolvedRun, assembly: Assembly, path: Path, ranks: Ranks, shapes: Shapes) -> None:
    """Load the weights of the step at ``path``: a run folder, its checkpoints, one step, or an imported folder.

    ``shapes`` are the logical tensors of which this rank holds a part. Collective. Whatever ranks saved them, each
    reads its own part. What is wrong on any rank is raised on all of them, as a :class:`CheckpointError`, before
    anything of ``assembly`` has changed.
    """
    place, step = json.loads(on_rank0(ranks, lambda: json.dumps(_choose(run, path))))
    checkpoints = Checkpoints(Path(place))
    activity = assembly.context.groups.activity
    manifest = on_all_ranks(ranks, lambda: _verify(checkpoints, step, ranks, activity.heartbeat))
    notes = ranks.gather(json.dumps(shapes))
    differences = on_rank0(ranks, lambda: differing_options(run, checkpoints, step))
    on_rank0(ranks, lambda: _compare(run, manifest, notes, checkpoints.folder(step)))
    if ranks.rank == 0:
        said = f"; {differences}" if differences else ""
        assembly.context.log.warning("weights of step %s of %s%s", step, checkpoints.path.parent, said)
    read = Reader(checkpoints.folder(step), manifest).read
    on_all_ranks(ranks, lambda: load(assembly.optimizer.load_weights, read))


def _choose(run: ResolvedRun, path: Path) -> tuple[str, int]:
    """The checkpoints' folder and the step, in words that all ranks understand."""
    checkpoints, step = choose_source(run, path)
    return str(checkpoints.path), step


def _verify(checkpoints: Checkpoints, step: int, ranks: Ranks, heartbeat: Callable[[], None]) -> Manifest:
    def start_there(older: int) -> str:
        return f"to start from step {older}: --set run.init_from={checkpoints.folder(older)}"

    with checkpoints.offering_older(step, start_there):
        return verify_share(checkpoints, step, ranks, heartbeat)


def _compare(run: ResolvedRun, manifest: Manifest, notes: Sequence[str], folder: Path) -> str:
    """Raise :class:`CheckpointError` where the ranks' ``notes`` of shapes are not those that were saved."""
    saved = {name: fields[MASTER].shape for name, fields in manifest.tensors.items()}
    wanted: Shapes = {name: tuple(shape) for note in notes for name, shape in json.loads(note).items()}
    refuse_other_model(run, folder, _differing_shapes(saved, wanted))
    return ""


def _differing_shapes(saved: Shapes, wanted: Shapes) -> list[str]:
    texts = []
    for name in sorted(saved.keys() | wanted.keys()):
        there, here = (str(list(shapes[name])) if name in shapes else "missing" for shapes in (saved, wanted))
        if there != here:
            texts.append(f"{name} is {there} there, {here} here")
    return texts

"""Starting from weights that another run or an import left (``run.init_from``): the weights, and nothing else of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_run.checkpoint.ranks import all_do, first_does
from megatron_run.checkpoint.reader import Reader
from megatron_run.checkpoint.show import find
from megatron_run.checkpoint.step_folder import Checkpoints
from megatron_run.contracts.state import MASTER
from megatron_run.errors import CheckpointError, advice
from megatron_run.run_folder.identity import identity
from megatron_run.training.resuming import verify_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from megatron_run.checkpoint.manifest import Manifest
    from megatron_run.checkpoint.ranks import Ranks
    from megatron_run.contracts import ReadState
    from megatron_run.resolve import ResolvedRun
    from megatron_run.training.build import Assembly

#: Options of a model that the same weights do not settle: how it is trained, and how far its rotations reach.
_FREE = frozenset({"model.dropout", "model.init_std", "model.label_smoothing", "model.rope_theta"})
_MOST = 3
Shapes = Mapping[str, tuple[int, ...]]


def start_from(run: ResolvedRun, assembly: Assembly, path: Path, ranks: Ranks, shapes: Shapes) -> None:
    """Load the weights of the step at ``path``: a run folder, its checkpoints, one step, or an imported folder.

    ``shapes`` are the logical tensors of which this rank holds a part. Collective. Whatever ranks saved them, each
    reads its own part. What is wrong on any rank is raised on all of them, as a :class:`CheckpointError`, before
    anything of ``assembly`` has changed.
    """
    place, step = json.loads(first_does(ranks, lambda: json.dumps(_choose(run, path))))
    checkpoints = Checkpoints(Path(place))
    manifest = all_do(ranks, lambda: verify_share(checkpoints, step, ranks))
    notes = ranks.gather(json.dumps(shapes))
    differences = first_does(ranks, lambda: _compare(run, manifest, notes, checkpoints.folder(step)))
    if ranks.rank == 0:
        said = f"; {differences}" if differences else ""
        assembly.context.log.warning("weights of step %s of %s%s", step, checkpoints.path.parent, said)
    read = _reading(Reader(checkpoints.folder(step), manifest))
    all_do(ranks, lambda: assembly.optimizer.load_state(read))


def _choose(run: ResolvedRun, path: Path) -> tuple[str, int]:
    """The checkpoints' folder, and the step that ``path`` names or the newest."""
    try:
        checkpoints, step = find(path.expanduser())
    except CheckpointError as error:
        error.origin = str(run.origins.get(("run", "init_from"), ""))
        error.fix = advice(error.fix, "a model of another format is imported first: megatron-run import SOURCE FOLDER")
        raise
    return str(checkpoints.path.absolute()), checkpoints.steps()[-1] if step is None else step


def _compare(run: ResolvedRun, manifest: Manifest, notes: Sequence[str], folder: Path) -> str:
    """How the model differs from the saved one where that is allowed. Raises :class:`CheckpointError` elsewhere."""
    saved = {name: fields[MASTER].shape for name, fields in manifest.tensors.items()}
    wanted: Shapes = {name: tuple(shape) for note in notes for name, shape in json.loads(note).items()}
    options = _differing_options(manifest.about.identity, identity(run))
    refused = [text for key, text in options.items() if key not in _FREE]
    reasons = [*refused, *_differing_shapes(saved, wanted)]
    if reasons:
        rest = f" and {len(reasons) - _MOST} more" if len(reasons) > _MOST else ""
        raise CheckpointError(
            f"the weights in {folder} are of another model",
            why="; ".join(reasons[:_MOST]) + rest,
            origin=str(run.origins.get(("run", "init_from"), "")),
            fix="give the same model and train.sequence_length, as its config.yaml says them",
        )
    return ", ".join(options.values())


def _differing_options(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Options of the model that both say, and say differently; shapes tell of those that one leaves open."""
    both = [key for key in now if key.startswith("model.") and None not in (saved.get(key), now[key])]
    return {key: f"{key}={saved[key]} there, {now[key]} here" for key in both if saved[key] != now[key]}


def _differing_shapes(saved: Mapping[str, tuple[int, ...]], wanted: Shapes) -> list[str]:
    texts = []
    for name in sorted(saved.keys() | wanted.keys()):
        there, here = (str(list(shapes[name])) if name in shapes else "missing" for shapes in (saved, wanted))
        if there != here:
            texts.append(f"{name} is {there} there, {here} here")
    return texts


def _reading(reader: Reader) -> ReadState:
    """Weights as they were saved; moments and counters of the update rule start from zeros."""

    def read(name: str, field: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        return reader.read(name, field, starts, sizes) if field == MASTER else torch.zeros(sizes)

    return read

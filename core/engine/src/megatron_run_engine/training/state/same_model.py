"""Whether saved weights are those of a run's model, and whether ids mean to its data what they meant to the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from megatron_run.contracts import MASTER
from megatron_run.errors import CheckpointError, DataError
from megatron_run_engine.checkpoint.kept_files import kept_tokenizer, same_tokenizer, tokenizer_files
from megatron_run_engine.data.standalone_tokenizer import reads_bytes, same_vocabulary
from megatron_run_engine.run_folder.changes import Change, identity
from megatron_run_engine.runtime.parameter_init import shapes_of, trained

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.checkpoint.reader import Reader
    from megatron_run_engine.checkpoint.step_folder import Checkpoints
    from megatron_run_engine.training.build import Assembly

#: The key whose change lets ids mean something else: a change of the data as a whole does not.
TOKENIZER_KEY = "data.tokenizer"
#: Differences named in one message.
_MOST = 3
#: Global shapes of logical tensors, by name.
Shapes = Mapping[str, tuple[int, ...]]


def check_tokenizer(run: ResolvedRun, checkpoints: Checkpoints, step: int) -> tuple[Change, ...]:
    """Check that the data has the vocabulary with which the weights of ``step`` were trained, where that is known.

    Returns another one as a change, where ``--allow-change`` names that key. Else raises :class:`DataError` that names
    both tokenizers.
    """
    about = checkpoints.manifest(step).about
    kept = None if about.tokenizer is None else kept_tokenizer(checkpoints.home, about)
    if about.tokenizer is None and not reads_bytes(about.identity):
        return ()
    now = run.make_data().tokenizer_file
    if about.tokenizer is not None and kept is None:  # it is lost: only the same file will do
        same = now is not None and same_tokenizer(str(now), about.tokenizer)
    else:
        same = (now is not None or reads_bytes(identity(run))) and same_vocabulary(kept, now)
    if same:
        return ()
    name = str(now or run.config.data.options.get("tokenizer", run.one("data")))
    trained = "bytes" if about.tokenizer is None else about.tokenizer.name
    if TOKENIZER_KEY not in run.request.allow_change:
        now_has = "which has changed" if name == trained else f"the data has {name}"
        raise DataError(
            f"the data has another tokenizer than the weights in {checkpoints.folder(step)}",
            why=f"they were trained with {trained}, {now_has}",
            fix=f"--set {quote(f'data.tokenizer={kept or trained}')}, or to train with another vocabulary: "
            f"--allow-change {TOKENIZER_KEY}",
        )
    old = None if about.tokenizer is None else about.tokenizer.sha256
    new = None if now is None else tokenizer_files(Path(now)).record.sha256
    return (Change.of_content(TOKENIZER_KEY, old, new),)


def check_shapes(run: ResolvedRun, assembly: Assembly, reader: Reader, folder: Path) -> None:
    """Check that the tensors of which this rank trains a part have the shapes that the step in ``folder`` has.

    A part of a larger tensor could be read all the same. Raises :class:`CheckpointError`.
    """
    wanted = shapes_of(map(trained, assembly.infos))
    saved = {name: shape for name in wanted if (shape := reader.shape(name, MASTER)) is not None}
    refuse_other_model(run, folder, differing_shapes(saved, {name: wanted[name] for name in saved}))


def refuse_other_model(run: ResolvedRun, folder: Path, differences: Sequence[str]) -> None:
    """Raise :class:`CheckpointError` with the first of ``differences``, if there are any."""
    if differences:
        rest = f" and {len(differences) - _MOST} more" if len(differences) > _MOST else ""
        raise CheckpointError(
            f"the weights in {folder} are of another model",
            why="; ".join(differences[:_MOST]) + rest,
            origin=origin_of_weights(run),
            fix="give the same model and train.sequence_length, as the config.yaml there says them",
        )


def differing_shapes(saved: Shapes, wanted: Shapes) -> list[str]:
    """Return a text for each tensor that has another shape on the other side, or is missing there."""
    texts = []
    for name in sorted(saved.keys() | wanted.keys()):
        there, here = (str(list(shapes[name])) if name in shapes else "missing" for shapes in (saved, wanted))
        if there != here:
            texts.append(f"{name} is {there} there, {here} here")
    return texts


def origin_of_weights(run: ResolvedRun) -> str:
    """Where ``run.init_from`` was said; empty where it was not."""
    return str(run.origins.get(("run", "init_from"), ""))

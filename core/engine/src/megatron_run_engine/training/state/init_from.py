"""Starts a run from another: from its weights (``run.init_from``), or with all its state (``run.branch_from``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from megatron_run.config.run_home import run_and_step
from megatron_run.contracts import NewParts
from megatron_run.contracts.meaning import BETWEEN_ATTEMPTS, OF_NEW_PART
from megatron_run.errors import CheckpointError, InputError
from megatron_run.errors.wording import advice
from megatron_run.planning.batch_size import run_length
from megatron_run.registry.discover import plain_name
from megatron_run_engine.checkpoint.adapted import open_step
from megatron_run_engine.checkpoint.collectives import on_all_ranks, on_rank0
from megatron_run_engine.checkpoint.memory_folder import run_in
from megatron_run_engine.checkpoint.memory_home import newest_in_memory, not_on_disk
from megatron_run_engine.checkpoint.step_folder import CHECKPOINTS, IMPORTED, Checkpoints, find_step
from megatron_run_engine.run_folder.changes import identity, meaning_of_keys
from megatron_run_engine.run_folder.idle_options import idle_keys
from megatron_run_engine.run_folder.permissions import with_granted
from megatron_run_engine.runtime.parameter_init import initial_values
from megatron_run_engine.training.state.adapting import fill_frozen
from megatron_run_engine.training.state.reading import load
from megatron_run_engine.training.state.resuming import Resumed, accept, resume, verify_share
from megatron_run_engine.training.state.same_model import (
    Shapes,
    check_tokenizer,
    differing_shapes,
    origin_of_weights,
    refuse_other_model,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from megatron_run.contracts.optimizer import ReadState
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.checkpoint.collectives import Ranks
    from megatron_run_engine.checkpoint.manifest import DataRecord, Manifest
    from megatron_run_engine.training.build import Assembly


#: A vocabulary may be padded to this many times its size before a smaller one in the data is doubted.
_PADDED = 1.1


def check_source(run: ResolvedRun) -> None:
    """Check, before anything starts, that ``run.init_from`` holds a checkpoint of a model with the same options.

    The step of ``--resume`` must be there. So must that of ``run.branch_from``, and nothing else may differ that gives
    its state a meaning. Raises :class:`CheckpointError`, and :class:`InputError` for a branch that is at the run's end.
    A run that resumes from its own checkpoint reads neither source.
    """
    config = run.config.run
    _check_resumed(run)
    if (config.init_from is None and config.branch_from is None) or _resumes(run):
        return
    run = _as_granted(run)
    if config.init_from is not None:
        checkpoints, step = choose_source(run, config.init_from)
        differing_options(run, checkpoints, step)
        check_tokenizer(run, checkpoints, step)
    if config.branch_from is not None:
        checkpoints, step = choose_branch(run, config.branch_from)
        about = checkpoints.manifest(step).about
        progress = accept(run, about, about.data, checkpoints.home, None).progress
        last, _ = run_length(run.config.train, progress.step, progress.samples)
        length = "train.steps" if run.config.train.samples is None else "train.samples"
        if progress.step >= last:
            raise InputError(
                f"nothing is left to train: run.branch_from is at step {progress.step}, and this run ends at {last}",
                origin=str(run.origins.get(("run", "branch_from"), "")),
                fix=f"raise {length}, or branch from an earlier step: --set run.branch_from=RUN@STEP",
            )


def _check_resumed(run: ResolvedRun) -> None:
    """Raise :class:`CheckpointError` where ``--resume`` names a step that the run lacks; there may be no run yet."""
    folder, choice = run.config.run.folder, run.request.resume
    if folder is None or choice in ("auto", "never"):
        return
    home = folder.expanduser()
    if _has_saved(run) or (home / "run.json").exists():
        try:
            Checkpoints(home / CHECKPOINTS).find(int(choice))
        except CheckpointError as missing:
            held = newest_in_memory(run.config.checkpoint, str(run_in(home)), home)
            if held is not None and held >= int(choice):
                raise not_on_disk(int(choice), held) from missing
            raise


def check_shapes(run: ResolvedRun, shapes: Shapes) -> None:
    """Check that the weights of ``run.init_from`` have ``shapes``, as :func:`start_from` does. Raises as it does.

    An option that follows from another one (the positions from ``train.sequence_length``) differs here alone.
    """
    path = run.config.run.init_from
    if path is not None and not _resumes(run):
        checkpoints, step = choose_source(run, path)
        reader = open_step(checkpoints, step, checkpoints.manifest(step), verify=False)
        _compare(run, reader.shapes(), [json.dumps(shapes)], checkpoints.folder(step), new_parts(run).prefixes)


def unloaded_weights(run: ResolvedRun) -> str:
    """Return a notice if a configuration lies beside imported weights with which the run does not start, else ""."""
    config = run.config.run
    if config.init_from is not None or config.branch_from is not None or _resumes(run):
        return ""
    homes = (Path(path).expanduser().absolute().parent for path in run.request.configs if isinstance(path, str))
    for home in homes:
        checkpoints = Checkpoints(home / CHECKPOINTS)
        step = next(iter(checkpoints.steps()), None)
        if step is not None and checkpoints.manifest(step).about.run == IMPORTED:
            return (
                f"the weights beside {home / 'config.yaml'} are not loaded: add --set {quote(f'run.init_from={home}')}"
            )
    return ""


def choose_branch(run: ResolvedRun, text: str) -> tuple[Checkpoints, int]:
    """Return the checkpoints and the step that ``RUN@STEP`` names, without ``@STEP`` the newest.

    Raises :class:`CheckpointError`, which names the steps that are there, if there is none.
    """
    path, at = run_and_step(text)
    number = at.removeprefix("@").removeprefix("step")
    try:
        if not number.isdecimal():
            return find_step(Path(text).expanduser().absolute())
        checkpoints, step = find_step(Path(path).expanduser().absolute(), int(number))
        checkpoints.find(step)
    except CheckpointError as error:
        error.origin = str(run.origins.get(("run", "branch_from"), ""))
        raise
    return checkpoints, step


def choose_source(run: ResolvedRun, path: Path) -> tuple[Checkpoints, int]:
    """Return the checkpoints at ``path``, and the step that it names or the newest. Raises :class:`CheckpointError`."""
    try:
        return find_step(path.expanduser().absolute())
    except CheckpointError as error:
        error.origin = origin_of_weights(run)
        error.fix = advice(error.fix, "a model of another format is imported first: megatron-run import SOURCE FOLDER")
        raise


def differing_options(run: ResolvedRun, checkpoints: Checkpoints, step: int) -> str:
    """Describe the model options that differ. Raises :class:`CheckpointError` if one of them must not."""
    saved, now = checkpoints.manifest(step).about.identity, identity(run)
    options = _differences(saved, now)
    idle = idle_keys(saved, run, options)
    options = {key: text for key, text in options.items() if key not in idle}
    refuse_other_model(run, checkpoints.folder(step), [text for key, text in options.items() if key not in _free(run)])
    return ", ".join(options.values())


def _free(run: ResolvedRun) -> frozenset[str]:
    """The keys of the model that may differ for the same weights."""
    free = BETWEEN_ATTEMPTS | {OF_NEW_PART}
    return frozenset(key for key, marks in meaning_of_keys(run).items() if marks & free)


def new_parts(run: ResolvedRun) -> NewParts:
    """The parts of the model that may be new; by default none."""
    parts: NewParts = getattr(run.one("model").options, "new_parts", NewParts())
    return parts


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return a text for each model option that is set on both sides and differs."""
    # An option that one side leaves unset (``num_kv_heads``) has a derived value there: the shapes are compared later.
    both = [key for key in now if key.startswith("model.") and None not in (saved.get(key), now[key])]
    texts = {key: (_text(saved[key]), _text(now[key])) for key in both}
    return {key: f"{key}={there} there, {here} here" for key, (there, here) in texts.items() if there != here}


def _text(value: object) -> str:
    """Return an option as it is typed. A plugin's name counts without its distribution."""
    return str(value).lower() if isinstance(value, bool) else plain_name(str(value))


def _resumes(run: ResolvedRun) -> bool:
    """Whether ``run`` will resume from a checkpoint of its own folder."""
    return run.request.resume != "never" and _has_saved(run)


def _has_saved(run: ResolvedRun) -> bool:
    folder = run.config.run.folder
    return folder is not None and bool(Checkpoints(folder.expanduser() / CHECKPOINTS).steps())


def _as_granted(run: ResolvedRun) -> ResolvedRun:
    """``run`` with what earlier attempts were allowed to start with, until one of them has saved a step."""
    folder = run.config.run.folder
    return run if folder is None or _has_saved(run) else with_granted(run, folder.expanduser(), 0)


def branch(run: ResolvedRun, assembly: Assembly, source: str, ranks: Ranks, data: DataRecord) -> Resumed:
    """Load all state of the step that ``source`` names into a run of its own: moments, position, scaler. Collective.

    Every key may differ that does not give this state its meaning. An error on any rank is raised on all of them, as by
    :func:`~megatron_run_engine.training.state.resuming.resume`.
    """

    def chosen() -> str:
        checkpoints, step = choose_branch(run, source)
        return json.dumps((str(checkpoints.path), step))

    folder, step = json.loads(on_rank0(ranks, chosen))
    if ranks.rank == 0:
        assembly.context.log.warning("branch of step %d of %s", step, Path(folder).parent)
    return resume(_as_granted(run), assembly, Checkpoints(Path(folder)), ranks, data, step, decided=None)


def start_from(run: ResolvedRun, assembly: Assembly, path: Path, ranks: Ranks, shapes: Shapes) -> Path:
    """Load the weights at ``path``: a run folder, its checkpoints, one step, or an imported folder. Collective.

    ``shapes`` are the global shapes of the logical tensors of which this rank holds a part, adapters left out: they
    keep their initial values. Each rank reads its own part, whatever parallel layout saved the weights. An error on any
    rank is raised on all of them as a :class:`CheckpointError`, before any state of ``assembly`` has changed unless it
    is one of reading values. Returns the folder of the step.
    """
    folder, step = json.loads(on_rank0(ranks, lambda: json.dumps(_choose(run, path))))
    checkpoints = Checkpoints(Path(folder))
    activity = assembly.context.groups.activity
    manifest = on_all_ranks(ranks, lambda: _verify(checkpoints, step, ranks, activity.heartbeat))
    notes = ranks.gather(json.dumps(shapes))
    differences = on_rank0(ranks, lambda: differing_options(run, checkpoints, step))
    reader = on_all_ranks(ranks, lambda: open_step(checkpoints, step, manifest, verify=ranks.rank == 0))
    new = () if assembly.adapters else new_parts(run).prefixes  # what is new must learn, and only adapters would
    on_rank0(ranks, lambda: _compare(run, reader.shapes(), notes, checkpoints.folder(step), new))
    if ranks.rank == 0:
        differing = f"; {differences}" if differences else ""
        assembly.context.log.warning("weights of step %s of %s%s", step, checkpoints.home, differing)
        known, here = manifest.about.identity.get("model.vocab_size"), assembly.data.vocab_size
        if manifest.about.tokenizer is None and known is not None and here * _PADDED < known:
            doubt = (
                "the data has %d token ids, the weights know %d: is data.tokenizer the one that they were trained with?"
            )
            assembly.context.log.warning(doubt, here, known)
    if assembly.adapters is None:
        read = _or_initial(reader.read, reader.shapes(), run, assembly)
        on_all_ranks(ranks, lambda: load(assembly.optimizer.load_weights, read))
    else:
        on_all_ranks(ranks, lambda: fill_frozen(assembly, reader))
    return checkpoints.folder(step)


def _choose(run: ResolvedRun, path: Path) -> tuple[str, int]:
    """Return the checkpoints' folder and the step, both as JSON values."""
    checkpoints, step = choose_source(run, path)
    return str(checkpoints.path), step


def _verify(checkpoints: Checkpoints, step: int, ranks: Ranks, heartbeat: Callable[[], None]) -> Manifest:
    def start_there(older: int) -> str:
        return f"to start from step {older}: --set {quote(f'run.init_from={checkpoints.folder(older)}')}"

    with checkpoints.offering_older(step, start_there):
        return verify_share(checkpoints, step, ranks, heartbeat)


def _compare(run: ResolvedRun, saved: Shapes, notes: Sequence[str], folder: Path, new: tuple[str, ...] = ()) -> str:
    """Raise :class:`CheckpointError` if the shapes in the ranks' ``notes`` differ from the ``saved`` ones.

    Those of names that begin with one of ``new`` may.
    """
    wanted: Shapes = {name: tuple(shape) for note in notes for name, shape in json.loads(note).items()}
    both = ({name: shape for name, shape in shapes.items() if not name.startswith(new)} for shapes in (saved, wanted))
    refuse_other_model(run, folder, differing_shapes(*both))
    return ""


def _or_initial(read: ReadState, found: Shapes, run: ResolvedRun, assembly: Assembly) -> ReadState:
    """``read``, but initial values of this rank's logical tensors that may be new, and are not among the ``found``."""
    prefixes = new_parts(run).prefixes
    new = {
        part.name: (part, info.init)
        for described in assembly.infos
        for info in described.values()
        for part in info.parts
        if part.name.startswith(prefixes) and found.get(part.name) != part.shape
    }
    if not new:
        return read
    assembly.context.log.warning("not of those weights, and so new: %s", ", ".join(sorted(new)))

    def read_or_make(name: str, field: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        if name not in new:
            return read(name, field, starts, sizes)
        box = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        whole: Tensor = initial_values(*new[name], run.config.train.seed)
        return whole[box]

    return read_or_make

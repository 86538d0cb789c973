"""Which saved step ``run.init_from`` means, and whether it is of the same model; known before a rank is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.errors import CheckpointError, advice
from megatron_run.registry.discover import KERNEL
from megatron_run_engine.checkpoint.step_folder import CHECKPOINTS, Checkpoints, find_step
from megatron_run_engine.run_folder.identity import identity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatron_run.planning import ResolvedRun

#: Options of a model that the same weights do not settle: how it is trained, and how far its rotations reach.
_FREE = frozenset({"model.dropout", "model.init_std", "model.label_smoothing", "model.rope_theta"})
#: Differences that one message names.
_MOST = 3


def check_source(run: ResolvedRun) -> None:
    """Whether ``run`` has a step to start from, of its own model as far as the options tell.

    Raises :class:`CheckpointError`. A run that goes on from a step of its own needs no other.
    """
    if run.config.run.init_from is not None and not _goes_on(run):
        checkpoints, step = choose_source(run, run.config.run.init_from)
        differing_options(run, checkpoints, step)


def choose_source(run: ResolvedRun, path: Path) -> tuple[Checkpoints, int]:
    """The saved steps at ``path`` and the one that it names, or the newest. Raises :class:`CheckpointError`."""
    try:
        return find_step(path.expanduser().absolute())
    except CheckpointError as error:
        error.origin = _origin(run)
        error.fix = advice(error.fix, "a model of another format is imported first: megatron-run import SOURCE FOLDER")
        raise


def differing_options(run: ResolvedRun, checkpoints: Checkpoints, step: int) -> str:
    """Which options of the model differ, where they may. Raises :class:`CheckpointError` where they may not."""
    options = _differences(checkpoints.manifest(step).about.identity, identity(run))
    refuse_other_model(run, checkpoints.folder(step), [text for key, text in options.items() if key not in _FREE])
    return ", ".join(options.values())


def refuse_other_model(run: ResolvedRun, folder: Path, differences: Sequence[str]) -> None:
    """Raise :class:`CheckpointError` with the first of ``differences``, where there are any."""
    if differences:
        rest = f" and {len(differences) - _MOST} more" if len(differences) > _MOST else ""
        raise CheckpointError(
            f"the weights in {folder} are of another model",
            why="; ".join(differences[:_MOST]) + rest,
            origin=_origin(run),
            fix="give the same model and train.sequence_length, as the config.yaml there says them",
        )


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Options that both say, and say differently; shapes tell of those that one leaves open."""
    both = [key for key in now if key.startswith("model.") and None not in (saved.get(key), now[key])]
    words = {key: (_word(saved[key]), _word(now[key])) for key in both}
    return {key: f"{key}={there} there, {here} here" for key, (there, here) in words.items() if there != here}


def _word(value: object) -> str:
    """As it is typed; ``gpt`` is ours, whether its distribution was named or not."""
    return str(value).lower() if isinstance(value, bool) else str(value).removeprefix(f"{KERNEL}:")


def _goes_on(run: ResolvedRun) -> bool:
    folder = run.config.run.folder
    if folder is None or run.request.resume == "never":
        return False
    return bool(Checkpoints(folder.expanduser() / CHECKPOINTS).steps())


def _origin(run: ResolvedRun) -> str:
    return str(run.origins.get(("run", "init_from"), ""))

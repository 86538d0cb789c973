"""``load``: the way from a folder to a :class:`LoadedModel`, in a person's program or notebook."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_run.config.request import Request
from megatron_run.errors import InputError
from megatron_run.registry.fetching import local_folder
from megatron_run_engine.host.environments import find_world
from megatron_run_engine.host.in_place import InPlace, in_place
from megatron_run_engine.host.process import join_world
from megatron_run_engine.runtime.world import World
from megatron_run_inference.loaded_model import LoadedModel
from megatron_run_inference.network import plan
from megatron_run_inference.source import find_source

#: Seconds after which a person is shown how far it is: most models are loaded by then.
PATIENCE = 1.0


def load(
    path: str | Path | None = None,
    *,
    step: int | None = None,
    device: str = "auto",
    sets: Mapping[str, Any] | Iterable[str] = (),
) -> LoadedModel:
    """Load a model in this process: of a run folder, a saved step, an imported folder, or one of another program.

    That may be elsewhere, as ``hf:ORG/NAME`` of the Hugging Face Hub.

    None is the latest run; ``step`` is one of its steps, by default the newest. ``device`` is ``auto``, ``cpu`` or
    ``cuda``. ``sets`` change configuration keys, as ``{"train.precision": "bf16"}``. What an import of the folder would
    note is given as warnings. In a program that torchrun or srun
    has started, this process is one rank of the model: every rank calls this and the model's methods alike. Raises
    :class:`~megatron_run.errors.RunError`.
    """
    world = find_world(os.environ)
    place = None if path is None else local_folder(Path(path)).expanduser()
    with watching("checking", "MB", world) as watch:
        source = find_source(place, step, watch=watch)
    for note in source.notes:
        warnings.warn(note, stacklevel=2)
    words = () if isinstance(sets, Mapping) else tuple(sets)
    values = {"run.device": device, **(sets if isinstance(sets, Mapping) else {})}
    run = plan(source, Request(sets=words, values=values, nproc=None if world is None else world.size))
    if world is None and run.sizes.world > 1:
        raise InputError(
            f"one process cannot be {run.sizes.world} ranks",
            fix=f"start the program with torchrun --nproc-per-node {run.sizes.world}; or use megatron-run generate or "
            "eval, which start them",
        )
    joined = join_world(run, World() if world is None else world)
    with watching("loading", "tensors", world) as watch:
        return LoadedModel(run, source, joined, watch=watch)


@contextmanager
def watching(what: str, unit: str, world: World | None) -> Iterator[Callable[[int, int], None]]:
    """Shows how many of all are done, in a notebook or at a terminal, where it takes long; called with both.

    The ranks of ``world`` share one terminal: the first one shows it.
    """
    console = Console(stderr=True)  # standard output is the program's
    shown: InPlace | None = None

    def watch(done: int, total: int) -> None:
        nonlocal shown
        if shown is None and (world is None or world.rank == 0):
            shown = in_place(console, what, total, after=PATIENCE, passing=True)
        if shown is not None:
            shown.show(done, unit)

    try:
        yield watch
    finally:
        if shown is not None:
            shown.stop()

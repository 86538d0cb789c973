"""The frozen weights of a run that trains adapters: where a resumed run finds them, and how they are filled."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

from megatron_run.contracts import MASTER, Lender
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.adapted import MergedReader, adapters_fault, find_base, open_step
from megatron_run_engine.checkpoint.manifest import AdaptersRecord
from megatron_run_engine.checkpoint.reader import Reader
from megatron_run_engine.runtime.parameter_init import fill

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.checkpoint.collectives import Ranks
    from megatron_run_engine.checkpoint.manifest import About
    from megatron_run_engine.training.build import Assembly


class Base(NamedTuple):
    """The frozen weights under a step of adapters; ``record`` names where they are now.

    There are none to read where a step holds all weights, or the frozen ones are random.
    """

    reader: Reader | MergedReader | None
    record: AdaptersRecord | None


def check_adapters(assembly: Assembly, saved: About, folder: Path) -> None:
    """Raise :class:`CheckpointError` unless the run has the adapters that ``saved`` holds, or like it none."""
    faults = list(adapters_fault(saved.adapters, assembly.adapters))
    if faults:
        raise CheckpointError(
            f"step {saved.step} belongs to a run with other adapters",
            why="; ".join(faults),
            fix="give the same parallel-layer, or start from the merged weights: another run.folder with "
            f"--set {quote(f'run.init_from={folder}')}",
        )


def open_base(run: ResolvedRun, assembly: Assembly, saved: About, folder: Path, ranks: Ranks) -> Base:
    """Find the weights that the adapters ``saved`` in ``folder`` adapt.

    Rank 0 verifies their files. Raises :class:`CheckpointError` if they are gone, or the run has other adapters.
    """
    check_adapters(assembly, saved, folder)
    record = saved.adapters
    if record is None or not record.base:
        return Base(None, record)
    under, step = find_base(record, folder, run.config.run.init_from)
    manifest = under.verify(step) if ranks.rank == 0 else under.manifest(step)
    reader = open_step(under, step, manifest, verify=ranks.rank == 0)
    return Base(reader, record.model_copy(update={"base": str(under.folder(step))}))


def fill_frozen(assembly: Assembly, reader: Reader | MergedReader | None) -> None:
    """Copy this rank's part of every frozen weight from ``reader``, if there is one."""
    if reader is None:
        return
    failure: Exception | None = None
    # To their end, also where one cannot be read: the other ranks gather with this one.
    for parameter, info in assembly.values():
        if parameter.requires_grad or failure is not None:
            continue
        try:
            fill({parameter: info}, lambda name, starts, sizes: reader.read(name, MASTER, starts, sizes))
        except Exception as error:
            failure = error
        if isinstance(assembly.optimizer, Lender):
            assembly.optimizer.keep((parameter,))
    if failure is not None:
        raise failure

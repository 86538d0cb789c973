"""Compares the data of all ranks before the first step.

A rank takes its share of a batch by the samples' indices, and the stages of a pipeline read the tokens and the labels
of one sample apart. Where data depends on the rank, they would train on pairs that no sample holds, in silence.
"""

from __future__ import annotations

import json
from shlex import quote
from typing import TYPE_CHECKING

import torch

from megatron_run.errors import DataError
from megatron_run_engine.checkpoint.collectives import WorldRanks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatron_run.registry.loaded_plugin import Plugin
    from megatron_run_engine.checkpoint.manifest import DataRecord
    from megatron_run_engine.runtime.context import BuildContext

#: Hexadecimal digits of a hash that are compared: as many as fit into an int64.
_DIGITS = 15


def check_same_data(plugin: Plugin, records: Mapping[str, DataRecord], context: BuildContext) -> None:
    """Compare this rank's ``records``, by split, with those of the other ranks. Collective over the world.

    Raises :class:`DataError` on every rank if the data of ``plugin`` differ. While they are the same, this is one small
    all-reduce.
    """
    values = [
        value
        for each in records.values()
        for value in (each.samples, int(each.sha256[:_DIGITS], 16), int((each.files or "0")[:_DIGITS], 16))
    ]
    extremes = torch.tensor([*values, *(-value for value in values)], device=context.device)
    highest, lowest = context.groups.max_(extremes, "world").chunk(2)
    if torch.equal(highest, -lowest):
        return
    topology = context.topology
    ranks = WorldRanks(context.groups, topology.rank, topology.sizes.world, context.device)
    records_of_ranks = ranks.gather(
        json.dumps({split: [each.samples, f"{each.sha256} {each.files}"] for split, each in records.items()})
    )
    raise DataError(
        "the ranks do not read the same data",
        why=ranks.broadcast("" if topology.rank else _difference([json.loads(text) for text in records_of_ranks])),
        origin=plugin.origin,
        fix="give every host the same files; samples must depend on neither the rank nor hash() of a text; "
        f"its suite says more: megatron-run plugins check {quote(f'data={plugin.reference}')}",
    )


def _difference(found: Sequence[Mapping[str, tuple[int, str]]]) -> str:
    """Data of the first rank that differs from rank 0; ``found`` are the samples and hash of each split, by rank."""
    first = found[0]
    differing = ((rank, split) for rank, each in enumerate(found) for split in first if each[split] != first[split])
    rank, split = next(differing)
    (count, _), (expected, _) = found[rank][split], first[split]
    differs = f"split {split} has {count} samples on rank {rank} and {expected} on rank 0"
    if count == expected:
        differs = f"samples of split {split} on rank {rank} are not those on rank 0"
    return f"{differs}, and each rank takes its share of a batch by index"

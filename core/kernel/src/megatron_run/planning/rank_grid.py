"""Derives the size of every parallel axis from the configuration and the number of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_run.config.origin import DEFAULT, Key, Origin, dotted
from megatron_run.contracts.schema import ParallelSection
from megatron_run.contracts.topology import Sizes
from megatron_run.errors import InputError, RunError, nearest_multiples


def infer_sizes(parallel: ParallelSection, nproc: int | None) -> Sizes:
    """The size of every axis; the data axis is the rest of a world of ``nproc`` ranks, or what experts need.

    Raises :class:`InputError` with the nearest worlds that divide.
    """
    tensor, pipeline, data = parallel.tensor, parallel.pipeline, parallel.data
    unit = tensor * pipeline
    if nproc is not None:
        if nproc < 1:
            raise InputError(f"--nproc {nproc} starts no rank", fix="start at least 1")
        product = f"parallel.tensor {tensor} x parallel.pipeline {pipeline}"
        if data is not None and nproc != unit * data:
            raise InputError(
                f"a world of {nproc} ranks was asked for",
                why=f"{product} x parallel.data {data} = {unit * data}",
                fix=f"start {unit * data} ranks (--nproc {unit * data}), or leave parallel.data open",
            )
        if nproc % unit:
            nearest = nearest_multiples(nproc, unit)
            raise InputError(
                f"a world of {nproc} ranks does not divide",
                why=f"{product} = {unit} ranks hold one copy of the model",
                fix=f"start {nearest} ranks (--nproc {nearest.partition(' ')[0]})",
            )
    world = nproc or unit * (data or parallel.expert)
    return Sizes(tensor=tensor, pipeline=pipeline, data=world // unit, expert=parallel.expert)


def idle_keys(parallel: ParallelSection) -> list[str]:
    """A notice for every key that was asked for and changes nothing in this topology."""
    notices = []
    if parallel.sequence and parallel.tensor == 1:
        notices.append("parallel.sequence=true splits nothing over one rank; set parallel.tensor to 2 or more")
    if parallel.scatter_messages and (reason := _nothing_to_scatter(parallel)):
        notices.append(f"parallel.scatter_messages=true changes nothing: {reason}")
    return notices


def _nothing_to_scatter(parallel: ParallelSection) -> str:
    if parallel.pipeline == 1:
        return "one pipeline stage sends no messages"
    if parallel.tensor == 1:
        return "one tensor-parallel rank has nobody to share a message with"
    return "with parallel.sequence=true each rank's messages are parts already" if parallel.sequence else ""


def attribute(error: RunError, origins: Mapping[Key, Origin]) -> None:
    """Set the origin of ``error``, unless it has one, to those of the keys that it names."""
    if not error.origin:
        text = f"{error.what} {error.why} {error.fix}"
        named = (origin for key, origin in origins.items() if origin != DEFAULT and _names(text, dotted(key)))
        error.origin = " and ".join(dict.fromkeys(map(str, named)))


def _names(text: str, key: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", text) is not None

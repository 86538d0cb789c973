"""Metrics beyond the loss: a model's logits for all samples of a split, and what the data makes of them.

Legend: b rows of a pass, s positions of the logits, k classes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from megatron_run.contracts import Microbatch
from megatron_run_engine.data.batches import fields
from megatron_run_engine.runtime.execute import StepInputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from megatron_run.contracts import Dataset
    from megatron_run_engine.runtime.generation import Network

#: What a model must not see to be asked for logits.
_ANSWERS = ("labels", "loss_mask")


@torch.no_grad()
def answers(network: Network, dataset: Dataset, names: Sequence[str], batch: int) -> Tensor:
    """Logits of every sample of ``dataset``, ``batch`` in a pass: fp32 [n, s, k] on the CPU of every rank.

    ``names`` are the fields of the samples. Collective over the world; the data-parallel copies take turns. The head
    is one that every tensor-parallel rank computes whole.
    """
    topology, device = network.context.topology, network.context.device
    copies, copy = topology.sizes.data, topology.peers("data").index(topology.rank)
    given = [name for name in names if name not in _ANSWERS]
    firsts = range(0, len(dataset), batch)
    found = torch.empty(0)
    for turn in range(0, len(firsts), copies):
        first = firsts[min(turn + copy, len(firsts) - 1)]
        # Rows are filled with the last sample: passes of one shape, which sequence and schedule were planned for.
        numbers = [min(first + row, len(dataset) - 1) for row in range(batch)]
        logits = _pass(network, Microbatch(0, 0, 0, fields(dataset, numbers, given, device), train=False))
        if not found.numel():
            found = torch.zeros(len(dataset), *_shape(network, logits), dtype=torch.float32, device=device)
        if logits is not None and turn + copy < len(firsts):
            found[first : first + batch] = logits[: len(dataset) - first]
    if topology.stage == network.last:
        network.context.groups.sum_(found, "data")
    return network.share(found).cpu()


def _pass(network: Network, microbatch: Microbatch) -> Tensor | None:
    """Logits [b, s, k] in fp32; None on a stage without the head."""
    rows, columns = microbatch.fields["tokens"].shape
    boundary = partial(network.model.boundary, micro_batch_size=rows, sequence_length=columns)
    record = network.executor.run(network.program, StepInputs(lambda _: microbatch, boundary, report=_ignore))
    return record.logits[0].transpose(0, 1).float() if record.logits else None


def _shape(network: Network, logits: Tensor | None) -> tuple[int, ...]:
    """The sizes s and k of the logits, on stages without the head too."""
    sizes = torch.tensor([0, 0] if logits is None else logits.shape[1:], device=network.context.device)
    return tuple(network.share(sizes).tolist())


def _ignore(microbatch: int, name: str, total: Tensor, weight: Tensor) -> None:
    """Ignore losses: there are no labels."""

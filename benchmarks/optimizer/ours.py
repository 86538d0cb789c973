"""This project's optimizers: ``adamw``, ``zero1``, ``zero3``, and ``zero1`` on ranks that do not talk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.optimizer.model import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Batch, build, gathered
from benchmarks.support.gpt import gpt_options, train_section
from benchmarks.support.shape import Shape
from megatron_run.contracts import Lender, Optimizer, StatePiece
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.builtin.optimizer import adamw
from megatron_run_engine.optim import FlatOptimizer, Sharded, ShardingStrategy, UpdateOptions
from megatron_run_engine.optim.buckets import Bucket
from megatron_run_engine.runtime.comm import Groups, Pending, create_groups
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_optimizer_zero1 import Zero1Options, megatron_run_create_optimizer
from megatron_run_optimizer_zero3 import Zero3Options
from megatron_run_optimizer_zero3 import megatron_run_create_optimizer as create_zero3
from megatron_run_testing.build_contexts import context_at

_NUMBERS = {"betas": BETAS, "eps": EPS}


class Ranks:
    """Where this rank is among the replicas, and its groups. Collective: made once a process."""

    def __init__(self) -> None:
        self.topology = Topology(Sizes(data=dist.get_world_size()), dist.get_rank())
        self.groups = create_groups(self.topology, dist.default_pg_timeout)

    def context(self, shape: Shape, groups: Groups | None = None) -> BuildContext:
        """The context of a model of ``shape``, in fp32."""
        groups = self.groups if groups is None else groups
        return context_at(
            self.topology,
            groups,
            gpt_options(shape),
            dtype=torch.float32,
            train=train_section(shape, dist.get_world_size()),
        )


class OurSide:
    """The trainer's work in a step with one optimizer.

    Parameters that an update has left on their way are gathered by the next step. Between two steps nothing may be on
    its way here, so a step starts with that instead of ending with it: all steps together do the same.
    """

    def __init__(self, context: BuildContext, shape: Shape, batch: Batch, optimizer: Optimizer) -> None:
        self._batch, self._optimizer, self._gradients = batch, optimizer, context.gradients
        self._model, infos = build(context, shape)
        for parameter, info in infos.items():
            self._gradients.adopt(parameter, info.name)
        self._parameters = tuple(infos)
        #: Of the logical tensors, by name.
        self.shapes = {part.name: part.shape for info in infos.values() for part in info.parts}
        #: Values of all parameters.
        self.values = sum(prod(shape) for shape in self.shapes.values())
        self._one = torch.ones(1)
        optimizer.attach([self._model.chunk], [infos], grad_scale=1 / dist.get_world_size())
        lender = optimizer if isinstance(optimizer, Lender) else None
        context.segments.read_parameters_after(optimizer.ensure_ready, None if lender is None else lender.release)
        if lender is not None:
            context.gradients.borrow_from(lender)

    def step(self) -> None:
        """As the trainer's, with one microbatch after the other."""
        optimizer, losses = self._optimizer, list[Tensor]()
        optimizer.start_param_sync()
        optimizer.zero_grad()
        self._gradients.start_step(self._batch.microbatches, optimizer.grad_ready)
        for microbatch in self._batch:
            loss = self._model(microbatch)
            (loss / self._batch.microbatches).backward()
            losses.append(loss.detach())
        optimizer.start_grad_sync(0)
        optimizer.finish_grad_sync()
        self.losses = torch.stack(losses)
        assert not optimizer.unscale_(self._one).item()
        optimizer.clip_(CLIP)
        optimizer.step(LR, WEIGHT_DECAY)

    def communicate(self) -> None:
        """Send what a step sends, and nothing else."""
        self._optimizer.start_param_sync()
        self._optimizer.zero_grad()
        self._optimizer.ensure_ready(self._parameters)
        self._optimizer.finish_grad_sync()

    def first_moments(self) -> Mapping[str, Tensor]:
        """Put together from the pieces of all ranks; what no piece fills is not a number, and passes no comparison."""
        wholes = {name: torch.full(shape, torch.nan) for name, shape in self.shapes.items()}
        for piece in (piece for rank in gathered(self._moments()) for piece in rank):
            box = tuple(slice(start, start + size) for start, size in zip(piece.starts, piece.sizes, strict=True))
            wholes[piece.name][box] = piece.tensor
        return wholes

    def state_bytes(self) -> int:
        """As the optimizer says."""
        return self._optimizer.memory()["state"]

    def pieces(self) -> Sequence[StatePiece]:
        """The share of this rank: weights and state, in boxes of logical tensors that share its memory."""
        return list(self._optimizer.iter_state())

    def _moments(self) -> Sequence[StatePiece]:
        pieces = (piece for piece in self.pieces() if piece.field == "exp_avg")
        return [piece._replace(tensor=piece.tensor.clone()) for piece in pieces]


class _Silent(ShardingStrategy):
    """As ``zero1``, but nothing is sent: what a step costs by itself. What is trained is worthless."""

    def __init__(self, sharded: Sharded) -> None:
        self._sharded = sharded

    def updated(self, bucket: Bucket) -> range:
        """This rank's share."""
        return self._sharded.updated(bucket)

    def start_reduce(self, bucket: Bucket) -> Pending:
        """Nothing."""
        return Pending(bucket.grad)

    def start_gather(self, values: Tensor, bucket: Bucket) -> Pending:
        """Nothing."""
        return Pending(values)


def all_reduced(ranks: Ranks, shape: Shape, batch: Batch) -> OurSide:
    """``optimizer=adamw``."""
    context = ranks.context(shape)
    optimizer = adamw.megatron_run_create_optimizer(context, UpdateOptions(**_NUMBERS))
    return OurSide(context, shape, batch, optimizer)


def sharded(ranks: Ranks, shape: Shape, batch: Batch, *, overlap: bool = True) -> OurSide:
    """``optimizer=zero1``."""
    context = ranks.context(shape)
    options = Zero1Options(**_NUMBERS, overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    return OurSide(context, shape, batch, megatron_run_create_optimizer(context, options))


def lent(ranks: Ranks, shape: Shape, batch: Batch, *, once_a_step: bool = False) -> OurSide:
    """``optimizer=zero3``; ``once_a_step``: it gathers and reduces each segment once, and holds all of them."""
    context = ranks.context(shape)
    options = Zero3Options(**_NUMBERS, **({"segments_held": 0, "reduce": "step"} if once_a_step else {}))
    return OurSide(context, shape, batch, create_zero3(context, options))


def silent(ranks: Ranks, shape: Shape, batch: Batch) -> OurSide:
    """The work of ``zero1`` without its communication."""
    peers, context = ranks.groups.parallel_group(ranks.topology, "replicas"), ranks.context(shape, Groups())
    optimizer = FlatOptimizer(context, UpdateOptions(**_NUMBERS), lambda _: _Silent(Sharded(peers)))
    return OurSide(context, shape, batch, optimizer)

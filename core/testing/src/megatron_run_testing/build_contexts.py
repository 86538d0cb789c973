"""Build contexts for tests of plugins, and chunks with initialised parameters and gradient buffers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor
from torch.nn import Parameter

from megatron_run.contracts import Chunk, Microbatch, ParamInfo
from megatron_run.contracts.schema import RunSection, TrainSection
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.registry.loaded_plugin import NoOptions
from megatron_run_engine.optim import build_buckets
from megatron_run_engine.runtime.comm import Groups
from megatron_run_engine.runtime.context import BuildContext, Dtypes
from megatron_run_engine.runtime.gradients import GradientAccumulator, main_grad
from megatron_run_engine.runtime.metrics import Metrics
from megatron_run_engine.runtime.offload import make_offload
from megatron_run_engine.runtime.parameter_init import describe_parameters, initialise
from megatron_run_engine.runtime.rng import RandomStreams
from megatron_run_engine.runtime.segments import SegmentRunner

_DEVICE = ContextVar("device", default="cpu")


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Within, whatever names no device is made on ``device``, so that the suites check one rank there.

    Checks on several ranks stay on the CPU.
    """
    before = _DEVICE.set(device)
    try:
        yield
    finally:
        _DEVICE.reset(before)


def current_device() -> torch.device:
    """The device of :func:`on_device`, else the CPU."""
    return torch.device(_DEVICE.get())


def single_process_context(
    model: BaseModel | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device | None = None,
    train: Mapping[str, Any] | None = None,
) -> BuildContext:
    """The context of a run with one rank.

    ``model`` is the model plugin's options with the vocabulary size filled in. ``dtype`` is the type of parameters;
    gradients are in at least fp32. ``train`` overrides keys of the train section (by default sequences of 16 tokens,
    two per microbatch).
    """
    return context_at(Topology(Sizes(), 0), Groups(), model, dtype=dtype, device=device, train=train)


def context_at(
    topology: Topology,
    groups: Groups,
    model: BaseModel | None = None,
    *,
    sequence: bool = False,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device | None = None,
    train: Mapping[str, Any] | None = None,
) -> BuildContext:
    """The context of the rank at ``topology``, otherwise as :func:`single_process_context`.

    ``sequence`` is ``parallel.sequence``. ``groups`` come from :func:`megatron_run_engine.runtime.comm.create_groups`,
    called once per process.
    """
    section = TrainSection.model_validate(
        {"steps": 1, "global_batch_size": 2, "micro_batch_size": 2, "sequence_length": 16, **(train or {})}
    )
    device = current_device() if device is None else torch.device(device)
    if device.type == "cuda":
        _start_backwards(device)
    rng, metrics = RandomStreams(section.seed, device, topology.tensor_rank, topology.context_rank), Metrics(device)
    return BuildContext(
        topology=topology,
        groups=groups,
        device=device,
        dtypes=Dtypes(param=dtype, main=torch.promote_types(dtype, torch.float32)),
        model=model or NoOptions(),
        train=section,
        run=RunSection(),
        gradients=GradientAccumulator(),
        rng=rng,
        metrics=metrics,
        segments=SegmentRunner(rng, make_offload(section, device, metrics)),
        log=logging.getLogger("megatron_run_testing"),
        sequence_shards=topology.sizes.tensor if sequence else 1,
    )


@cache
def _start_backwards(device: torch.device) -> None:
    """Run a kernel in the thread of autograd that serves ``device``.

    If a matrix product were the first one there, cuBLAS would find no current CUDA context: torch sets it, and warns.
    """
    (torch.ones(1, device=device, requires_grad=True) * 2).sum().backward()


def prepare(context: BuildContext, chunks: Sequence[Chunk]) -> dict[Parameter, ParamInfo]:
    """Initialise the parameters of one stage's ``chunks`` and allocate their gradients, as a run does."""
    infos = [describe_parameters(chunk, context.topology.tensor_rank) for chunk in chunks]
    described = {parameter: info for each in infos for parameter, info in each.items()}
    initialise(described, context.train.seed)
    for parameter, info in described.items():
        context.gradients.adopt(parameter, info.name)
    build_buckets(infos, 1, context.dtypes.main)
    return described


def logical_values(infos: Mapping[Parameter, ParamInfo]) -> dict[str, Tensor]:
    """The values of every logical tensor by canonical name, without padding."""
    return {name: rows.detach().clone() for name, rows in _pieces(infos, infos)}


def logical_gradients(infos: Mapping[Parameter, ParamInfo]) -> dict[str, Tensor]:
    """The accumulated gradient of every logical tensor by canonical name, without padding."""
    gradients = [main_grad(parameter) for parameter in infos]
    return {name: rows.clone() for name, rows in _pieces(infos, gradients)}


def example_microbatch(
    vocab: int, *, batch: int = 2, length: int = 16, step: int = 1, seed: int = 0, train: bool = True
) -> Microbatch:
    """Random tokens and labels [batch, length]; about a quarter of the labels are masked out."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(vocab, (2, batch, length), generator=generator)
    mask = (torch.rand(batch, length, generator=generator) > 0.25).float()
    fields = {"tokens": tokens, "labels": labels, "loss_mask": mask}
    return Microbatch(0, step, 0, {name: field.to(current_device()) for name, field in fields.items()}, train)


def _pieces(infos: Mapping[Parameter, ParamInfo], tensors: Iterable[Tensor]) -> Iterable[tuple[str, Tensor]]:
    for info, tensor in zip(infos.values(), tensors, strict=True):
        for part in info.parts:
            yield part.name, tensor[part.local.start : part.local.stop]

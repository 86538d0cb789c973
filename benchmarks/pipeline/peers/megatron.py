"""A step of the same chunks by megatron-core's 1F1B, where megatron-core is installed.

Its schedule and its messages run as they are; only the device that they name, which is always a GPU, is another.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline.peers.torch import Piece
from benchmarks.support.megatron import TorchOnCpu

if TYPE_CHECKING:
    from benchmarks.pipeline.model import Stage


class _Model(nn.Module):
    """A chunk in the form that megatron-core's schedules call."""

    def __init__(self, piece: Piece, config: Any, model_type: Any) -> None:
        super().__init__()
        self.piece, self.config, self.model_type = piece, config, model_type
        self._x: Tensor | None = None

    def set_input_tensor(self, x: Any) -> None:
        """Take the activation of the stage before, or ``[None]``."""
        self._x = x[0] if isinstance(x, list) else x

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [b, s] are used by the first stage only."""
        result: Tensor = self.piece(tokens if self._x is None else self._x)
        return result


class MegatronStep:
    """A step of ``stage``, which has one chunk, by ``forward_backward_pipelining_without_interleaving``."""

    def __init__(self, stage: Stage) -> None:
        self._stage, pipelines = stage, "megatron.core.pipeline_parallel"
        self._schedules = import_module(f"{pipelines}.schedules")
        messages = import_module(f"{pipelines}.p2p_communication")
        for module in (self._schedules, messages):
            vars(module)["torch"] = TorchOnCpu()
        config = import_module("megatron.core.transformer.transformer_config").TransformerConfig(
            num_layers=dist.get_world_size(),  # the chunk is ours: of the network its schedule reads the width only
            hidden_size=stage.shape.hidden,
            num_attention_heads=stage.shape.heads,
            pipeline_model_parallel_size=dist.get_world_size(),
            pipeline_dtype=torch.float32,
            deallocate_pipeline_outputs=True,
        )
        kind = import_module("megatron.core.enums").ModelType.encoder_or_decoder
        self._model = _Model(Piece(stage.chunks[0]), config, kind)
        alone, stages = SimpleNamespace(size=lambda: 1, rank=lambda: 0), dist.group.WORLD
        groups = {"tp": alone, "cp": alone, "pp": stages, "embd": None, "pos_embd": None, "dp_cp": None}
        self._groups = SimpleNamespace(**groups)
        self._messages = messages.P2PCommunicator(stages, config)

    def __call__(self) -> None:
        """Accumulate the gradients of one step."""
        shape = self._stage.shape
        losses = self._schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=self._forward,
            data_iterator=iter(range(shape.microbatches)),
            model=self._model,
            num_microbatches=shape.microbatches,
            seq_length=shape.sequence,
            micro_batch_size=shape.micro_batch,
            p2p_communicator=self._messages,
            pg_collection=self._groups,
        )
        self._stage.losses = losses

    def _forward(self, indices: Iterator[int], model: _Model) -> tuple[Tensor, Any]:
        """The output of the next microbatch, and the function from it to its loss."""
        index, b, stage = next(indices), self._stage.shape.micro_batch, self._stage
        samples = slice(index * b, (index + 1) * b)

        def loss(logits: Tensor) -> tuple[Tensor, Tensor]:
            """The mean over the microbatch, which the schedule divides by their number; and what to report."""
            cross_entropy = stage.chunks[0].cross_entropy
            assert cross_entropy is not None  # only the last stage has a loss
            total = cross_entropy(logits, stage.labels[samples]).sum() * stage.loss_scale
            return total * stage.shape.microbatches, total.detach()

        return model(stage.tokens[samples]), loss

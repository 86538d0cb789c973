"""A plain torch GPT of the same shapes, split by DTensor's colwise and rowwise plan with ``loss_parallel``.

Its modules carry the canonical names, so that weights are copied by name. Everything is [b, s, h].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.support.shape import Shape
from benchmarks.tensor_parallel.model import Batch, Weights

NAME = "DTensor"


class _Embedding(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word = nn.Embedding(shape.vocab, shape.hidden)
        self.position = nn.Embedding(shape.sequence, shape.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] -> [b, s, h]."""
        result: Tensor = self.word(tokens) + self.position.weight[: tokens.shape[1]]
        return result


class _Qkv(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h = shape.hidden
        self.head_size = h // shape.heads
        self.norm = nn.LayerNorm(h)
        self.query, self.key, self.value = nn.Linear(h, h), nn.Linear(h, h), nn.Linear(h, h)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """[b, s, h] -> three of this rank's heads, [b, n/t, s, d]."""
        y = self.norm(x)
        projected = (project(y).unflatten(-1, (-1, self.head_size)) for project in (self.query, self.key, self.value))
        return tuple(x.transpose(1, 2) for x in projected)


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.qkv, self.output = _Qkv(shape), nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        query, key, value = self.qkv(x)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return result


class _MlpInput(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(shape.hidden), nn.Linear(shape.hidden, 4 * shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, 4h/t]."""
        result: Tensor = self.up(self.norm(x))
        return result


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = _Attention(shape)
        self.mlp = nn.ModuleDict({"input": _MlpInput(shape), "output": nn.Linear(4 * shape.hidden, shape.hidden)})

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        x = x + self.attention(x)
        result: Tensor = x + self.mlp["output"](F.gelu(self.mlp["input"](x)))
        return result


class PlainGpt(nn.Module):
    """Tokens [b, s] -> logits [b, s, v], in torch's own modules."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = _Embedding(shape)
        self.layers = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.final_norm = nn.LayerNorm(shape.hidden)
        self.output = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Run all layers."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.output(self.final_norm(x))
        return result


def _plan(layers: int) -> dict[str, Any]:
    """The split of each module.

    The input of query, key and value is made a DTensor once: their three gradients then add up before the one
    all-reduce, which takes less time than three.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput, RowwiseParallel

    plan: dict[str, Any] = {
        "embedding.word": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for layer in range(layers):
        once = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
        )
        plan[f"layers.{layer}.attention.qkv.norm"] = once
        columns = ("attention.qkv.query", "attention.qkv.key", "attention.qkv.value", "mlp.input.up")
        plan |= {f"layers.{layer}.{name}": ColwiseParallel() for name in columns}
        plan |= {f"layers.{layer}.{name}": RowwiseParallel() for name in ("attention.output", "mlp.output")}
    return plan


class DTensorStep:
    """A step of :class:`PlainGpt` with the whole ``weights``, split over all ranks."""

    def __init__(self, shape: Shape, batch: Batch, weights: Weights) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import loss_parallel, parallelize_module  # half a second of imports

        self._loss_parallel = loss_parallel
        self.ranks, self._batch, self._losses = dist.get_world_size(), batch, list[Tensor]()
        model = PlainGpt(shape)
        model.load_state_dict(weights)
        self._model = parallelize_module(model, init_device_mesh("cpu", (self.ranks,)), _plan(shape.layers))

    def clear(self) -> None:
        """Forget losses and gradients."""
        self._model.zero_grad(set_to_none=True)  # the first microbatch then adds nothing to nothing
        self._losses.clear()

    def step(self) -> None:
        """Forward and backward of every microbatch."""
        with self._loss_parallel():
            for tokens, labels in self._batch:
                total = F.cross_entropy(self._model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
                loss = total * self._batch.scale
                loss.backward()
                self._losses.append(loss.detach())

    def results(self) -> dict[str, Tensor]:
        """The losses, and every gradient whole."""
        gradients = {name: _whole(parameter.grad) for name, parameter in self._model.named_parameters()}
        return gradients | {"losses": torch.stack([_whole(loss) for loss in self._losses])}


def _whole(tensor: Tensor | None) -> Tensor:
    from torch.distributed.tensor import DTensor

    assert tensor is not None  # every parameter is used
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

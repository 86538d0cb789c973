"""megatron-core's own GPT with its local layers, where megatron-core is installed: fp32, nothing fused for a GPU.

Its column layers overlap the all-reduce of the backward with the weight gradient, as ours do.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from benchmarks.support.megatron import TorchOnCpu
from benchmarks.support.shape import Shape
from benchmarks.tensor_parallel.model import Batch, Weights, gathered

#: The canonical name of a module -> megatron-core's. Query, key and value are one: ``linear_qkv``.
NAMES = {
    "embedding.word": "embedding.word_embeddings",
    "embedding.position": "embedding.position_embeddings",
    "attention.qkv.norm": "input_layernorm",
    "attention.output": "self_attention.linear_proj",
    "mlp.input.norm": "pre_mlp_layernorm",
    "mlp.input.up": "mlp.linear_fc1",
    "mlp.output": "mlp.linear_fc2",
    "final_norm": "decoder.final_layernorm",
    "output": "output_layer",
}
QKV = "self_attention.linear_qkv"
PROJECTIONS = ("query", "key", "value")
#: Parameters that are split, and along which dimension; the others are whole on every rank.
ROWS = re.compile(r"word_embeddings|linear_qkv|linear_fc1|output_layer")
COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight")
_LAYER = re.compile(r"layers\.(\d+)\.(.*)\.(weight|bias)")


def their_weights(weights: Weights, heads: int) -> dict[str, Tensor]:
    """Whole tensors by canonical name -> by megatron-core's, whose q, k and v lie head by head: [n, 3, d, *]."""
    converted: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if "qkv.key" in name or "qkv.value" in name:
            continue
        if "qkv.query" in name:
            parts = [weights[name.replace("query", other)].unflatten(0, (heads, -1)) for other in PROJECTIONS]
            tensor = torch.stack(parts, dim=1).flatten(0, 2)  # noqa: PLW2901  # what the name stands for there
        converted[_their_name(name)] = tensor
    return converted


def our_weights(weights: Weights, heads: int) -> dict[str, Tensor]:
    """The way back from :func:`their_weights`."""
    logical: dict[str, Tensor] = {}
    back = {foreign: name for name, foreign in NAMES.items()}
    for name, tensor in weights.items():
        module, _, kind = name.removeprefix("decoder.layers.").rpartition(".")
        layer, _, inner = module.partition(".") if name.startswith("decoder.layers.") else ("", "", module)
        prefix = f"layers.{layer}." if layer else ""
        if inner == QKV:
            parts = tensor.unflatten(0, (heads, 3, -1)).unbind(1)
            for projection, part in zip(PROJECTIONS, parts, strict=True):
                logical[f"{prefix}attention.qkv.{projection}.{kind}"] = part.flatten(0, 1)
        else:
            logical[f"{prefix}{back[inner]}.{kind}"] = tensor
    return logical


def _their_name(name: str) -> str:
    if match := _LAYER.fullmatch(name):
        layer, module, kind = match.groups()
        inner = QKV if module == "attention.qkv.query" else NAMES[module]
        return f"decoder.layers.{layer}.{inner}.{kind}"
    module, _, kind = name.rpartition(".")
    return f"{NAMES[module]}.{kind}"


def _split_along(name: str) -> int | None:
    return 0 if ROWS.search(name) else 1 if COLUMNS.search(name) else None


class MegatronStep:
    """A step of megatron-core's GPT with the whole ``weights``, split over all ranks."""

    def __init__(self, shape: Shape, batch: Batch, weights: Weights) -> None:
        self.ranks, self._batch, self._losses = dist.get_world_size(), batch, list[Tensor]()
        self._heads, self._positions = shape.heads, torch.arange(shape.sequence).expand(shape.micro_batch, -1)
        on_cpu(self.ranks)
        self._model = gpt_model(shape, self.ranks)
        whole = their_weights(weights, shape.heads)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                dim = _split_along(name)
                part = whole[name] if dim is None else whole[name].chunk(self.ranks, dim)[dist.get_rank()]
                parameter.copy_(part)

    def clear(self) -> None:
        """Forget losses and gradients."""
        self._model.zero_grad(set_to_none=True)  # the first microbatch then adds nothing to nothing
        self._losses.clear()

    def step(self) -> None:
        """Forward and backward of every microbatch."""
        for tokens, labels in self._batch:
            loss = self._model(tokens, self._positions, None, labels=labels).sum() * self._batch.scale
            loss.backward()
            self._losses.append(loss.detach())

    def results(self) -> dict[str, Tensor]:
        """The losses, and the gradients put together from the parts of all ranks."""
        ranks = gathered({name: parameter.grad for name, parameter in self._model.named_parameters()})
        dims = {name: _split_along(name) for name in ranks[0]}
        whole = {
            name: ranks[0][name] if dim is None else torch.cat([rank[name] for rank in ranks], dim)
            for name, dim in dims.items()
        }
        return our_weights(whole, self._heads) | {"losses": torch.stack(self._losses)}


def on_cpu(ranks: int) -> None:
    """Make megatron-core's groups, once a process, and put the CPU where its modules name a GPU.

    Dropout, here 0, needs no tracker.
    """
    state = import_module("megatron.core.parallel_state")
    state.initialize_model_parallel(tensor_model_parallel_size=ranks, create_gloo_process_groups=False)
    for module in ("utils", "transformer.utils"):
        vars(import_module(f"megatron.core.{module}"))["torch"] = TorchOnCpu()
    tracker = SimpleNamespace(fork=nullcontext)
    vars(import_module("megatron.core.tensor_parallel"))["get_cuda_rng_tracker"] = lambda: tracker


def gpt_model(shape: Shape, ranks: int, *, tied: bool = False, local: bool = True, **options: Any) -> Any:
    """Its GPT, split over ``ranks``, of ``local`` layers or Transformer Engine's.

    ``options`` are more fields of its ``TransformerConfig``.
    """
    config = import_module("megatron.core.transformer.transformer_config").TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        tensor_model_parallel_size=ranks,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_func=F.gelu,
        use_cpu_initialization=local,
        gradient_accumulation_fusion=False,
        **options,
    )
    gpt, specs = (import_module(f"megatron.core.models.gpt.{name}") for name in ("gpt_model", "gpt_layer_specs"))
    layers = specs.get_gpt_layer_local_spec if local else specs.get_gpt_layer_with_transformer_engine_spec
    return gpt.GPTModel(
        config=config,
        transformer_layer_spec=layers(),
        vocab_size=shape.vocab,
        max_sequence_length=shape.sequence,
        share_embeddings_and_output_weights=tied,
    )

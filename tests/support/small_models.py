"""Small models with random weights: as saved steps, and as networks that compute their logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_run.config.values import flat, nested
from megatron_run.contracts import Microbatch, Model
from megatron_run.contracts.optimizer import StatePiece
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.checkpoint.saving import Saver
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_model_deepseek import DeepSeek, DeepSeekOptions
from megatron_run_testing.build_contexts import logical_values, single_process_context
from megatron_run_testing.model import Built, build_model
from tests.support.saved_steps import RUN, Alone, about

#: Sizes that all differ, so that an axis that is taken for another does not fit.
GPT2: Mapping[str, Any] = {"num_layers": 2, "hidden_size": 24, "num_heads": 3, "ffn_size": 40, "vocab_size": 61}
LLAMA: Mapping[str, Any] = {
    **GPT2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "position": "rope",
    "rope.theta": 500.0,
    "norm.kind": "rmsnorm",
    "norm.eps": 3e-5,
    "activation": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}
LENGTH = 16


def options_of(given: Mapping[str, Any]) -> GptOptions:
    """A standard deviation of 0.3 makes every path matter."""
    return GptOptions.model_validate(nested({"init_std": 0.3, **given}))


def network(options: GptOptions) -> Built:
    """The model itself, in fp32, with its initial weights and random biases, norms and scales."""
    context = single_process_context(options, dtype=torch.float32, train={"sequence_length": LENGTH})

    def make(context: BuildContext, _: object) -> Model:
        return DeepSeek(context, options) if isinstance(options, DeepSeekOptions) else Gpt(context, options)

    built = build_model(make, context, options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (each for each in built.infos if each.ndim == 1):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return built


def fill(built: Built, values: Mapping[str, Tensor]) -> None:
    """Give the network these weights, by logical name; each must be there."""
    with torch.no_grad():
        for parameter, info in built.infos.items():
            for part in info.parts:
                parameter[part.local.start : part.local.stop].copy_(values[part.name])


def logits_of(built: Built, tokens: Tensor, vocab: int) -> Tensor:
    """Tokens [b, s] -> [b, s, v], the padding of the vocabulary left out."""
    with torch.no_grad():
        found = built.train(mode=False).forward(Microbatch(0, 1, 0, {"tokens": tokens}, train=False))[0].logits
    assert found is not None
    return found[..., :vocab].transpose(0, 1)


def save_model(
    path: Path,
    values: Mapping[str, Tensor],
    options: GptOptions,
    step: int = 7,
    *,
    moments: bool = False,
    use: str = "gpt",
) -> Checkpoints:
    """A step of a run as it would save it: masters, and moments with a counter where asked for."""
    checkpoints = Checkpoints(path / "checkpoints")
    fields: dict[str, Callable[[Tensor], Tensor]] = {"master": lambda values: values}
    if moments:
        fields |= {"exp_avg": lambda values: values * 2, "step": lambda values: torch.tensor(float(step))}
    pieces = []
    for name, tensor in values.items():
        for field, made in fields.items():
            value = made(tensor)
            pieces.append(StatePiece(name, field, (0,) * value.ndim, tuple(value.shape), value))
    identity = {"train.sequence_length": LENGTH, "model.use": use}
    identity |= flat({"model": options.model_dump(mode="json")})
    shapes = {name: tuple(tensor.shape) for name, tensor in values.items()}
    path.mkdir(parents=True, exist_ok=True)
    Saver(checkpoints, Alone(), RUN).save(about(step, identity=identity), pieces, shapes)
    return checkpoints


def saved_network(
    path: Path, given: Mapping[str, Any], *, step: int = 7, moments: bool = False
) -> tuple[Built, GptOptions]:
    """A network whose weights are saved as a step in the run folder ``path``."""
    options = options_of(given)
    built = network(options)
    save_model(path, logical_values(built.infos), options, step, moments=moments)
    return built, options

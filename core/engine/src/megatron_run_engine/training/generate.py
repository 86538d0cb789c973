"""Generates sample text, one forward-only microbatch per token."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from megatron_run.contracts import Microbatch
from megatron_run_engine.runtime.execute import StepInputs
from megatron_run_engine.runtime.rng import initial_generator
from megatron_run_engine.training.evaluate import set_training

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.training.build import Assembly


def generate_text(run: ResolvedRun, assembly: Assembly) -> str | None:
    """Generate ``eval.sample`` tokens after ``eval.prompt``. Return None if the data is not text. Collective.

    Each token is sampled from softmax(logits / ``eval.temperature``); temperature 0 takes the most likely token. The
    context is the last ``train.sequence_length`` tokens.
    """
    prompt = assembly.data.encode(run.config.eval.prompt or "\n")
    if not prompt:
        return None
    assembly.context.groups.activity.enter("generate")
    generator = initial_generator(run.config.train.seed, "sample")
    tokens = list(prompt)
    set_training(assembly.chunks, training=False)
    for _ in range(run.config.eval.sample):
        window = tokens[-run.config.train.sequence_length :]
        tokens.append(_next_token(run, assembly, window, generator))
    set_training(assembly.chunks, training=True)
    return assembly.data.decode(tokens)


def _next_token(run: ResolvedRun, assembly: Assembly, window: list[int], generator: torch.Generator) -> int:
    """Run the stages on ``window``. The last stage samples a token and broadcasts it to the others."""
    context, last = assembly.context, run.layout[-1].stage
    # Sequence parallelism splits the window evenly, so it is padded at the end. Attention is causal: padding changes no
    # earlier logits, except that experts with a capacity count it among the tokens that they may drop.
    filling = [window[-1]] * (-len(window) % context.sequence_shards)
    tokens = torch.tensor([window + filling], device=context.device)  # [1, s]
    microbatch = Microbatch(0, 0, 0, {"tokens": tokens}, train=False)
    boundary = partial(assembly.model.boundary, micro_batch_size=1, sequence_length=tokens.shape[1])
    inputs = StepInputs(lambda _: microbatch, boundary, report=_ignore)
    record = assembly.executor.run(assembly.programs.forward_only(1), inputs)
    drawn = torch.zeros(1, dtype=torch.int64, device=context.device)
    if record.logits:
        here = record.logits[0][len(window) - 1, 0]  # [p/t]
        logits = context.groups.peers(context.topology, "tensor").gather(here)  # [p]
        drawn[0] = draw(logits[: context.vocab_size], run.config.eval.temperature, generator)
    source = context.topology.peers("pipeline")[last]
    return int(context.groups.broadcast_(drawn, source, "pipeline").item())


def draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Sample a token from ``logits`` [v]."""
    if temperature == 0:
        return int(logits.argmax().item())
    probabilities = torch.softmax(logits.double().cpu() / temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator).item())


def _ignore(microbatch: int, name: str, total: Tensor, weight: Tensor) -> None:
    """Ignore losses: there are no labels."""

"""How likely a model finds given tokens: forward passes over windows of text, shared by the copies of the model.

Legend: b rows, s columns of a pass, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_run.contracts import Decoding

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run_engine.runtime.generation.tokens import Network

#: A target that is not scored.
IGNORED = -1


@dataclass(frozen=True)
class Window:
    """Tokens that a model reads in one pass, and the token to be scored after each of them, or ``IGNORED``."""

    inputs: Sequence[int]
    targets: Sequence[int]

    @classmethod
    def of(cls, tokens: Sequence[int], first: int) -> Window:
        """The window that scores ``tokens[first:]``, each given all before it; ``first`` is at least 1."""
        return cls(tokens[:-1], [IGNORED] * (first - 1) + list(tokens[first:]))

    @classmethod
    def ending(cls, tokens: Sequence[int], targets: int, longest: int) -> Window:
        """The window of at most ``longest`` inputs that scores the last ``targets`` of ``tokens``, as many as fit."""
        kept = tokens[-(longest + 1) :]
        return cls.of(kept, max(1, len(kept) - targets))


class Score(NamedTuple):
    """The score of a window: the log-probability of its targets, in nats, and how many of them were the likeliest."""

    logprob: float
    likeliest: int
    targets: int

    @property
    def greedy(self) -> bool:
        """Whether taking the likeliest token each time would have written every target."""
        return self.likeliest == self.targets


def text_windows(tokens: Sequence[int], longest: int, stride: int) -> list[Window]:
    """Windows of at most ``longest`` inputs that score each token but the first once, the last ``stride`` of a window.

    The first window scores all its targets; each later one begins ``stride`` tokens after the one before, so a target
    has at least ``longest - stride`` tokens of context (Megatron-LM paper, appendix E.1: 1024 and 32). Raises
    ValueError unless 1 <= stride <= longest.
    """
    if not 1 <= stride <= longest:
        raise ValueError(f"stride={stride}: it must be from 1 to the model's {longest} positions")
    targets = len(tokens) - 1
    found = [Window.of(tokens[: longest + 1], 1)] if targets > 0 else []
    later = range(stride, targets - longest + stride, stride)
    return found + [Window.of(tokens[start : start + longest + 1], longest - stride + 1) for start in later]


@torch.no_grad()
def score(
    network: Network, windows: Sequence[Window], batch: int = 8, progress: Callable[[int], object] | None = None
) -> list[Score]:
    """Score ``windows``, none of which is empty, ``batch`` of them in a pass. Every rank gets all scores.

    Collective over the world: every rank calls it with the same arguments. The data-parallel copies take turns.
    ``progress`` is told after each pass how many windows are scored.
    """
    topology = network.context.topology
    copies, copy = topology.sizes.data, topology.data_rank
    # Windows of one length together, the longest first: little padding, and memory runs out at once or never.
    order = sorted(range(len(windows)), key=lambda number: -len(windows[number].inputs))
    # And those apart that are read with other angles than longer ones: a pass has those of its longest.
    switch = network.angle_switch or 0
    short = next((place for place, number in enumerate(order) if len(windows[number].inputs) <= switch), len(order))
    sides = (order[:short], order[short:])
    batches = [side[start : start + batch] for side in sides for start in range(0, len(side), batch)]
    found = torch.zeros(len(windows), 2, dtype=torch.float64)
    for turn in range(0, len(batches), copies):
        # Experts may lie on other copies, so all copies run equally many passes; one too many is not counted.
        index = turn + copy
        numbers = batches[min(index, len(batches) - 1)]
        scores = _pass(network, [windows[number] for number in numbers])
        if scores is not None and index < len(batches) and not topology.context_rank:
            found[numbers] = scores
        if progress:
            progress(min((turn + copies) * batch, len(windows)))
    found = _shared(network, found)
    counts = [sum(target != IGNORED for target in window.targets) for window in windows]
    return [Score(row[0], round(row[1]), count) for row, count in zip(found.tolist(), counts, strict=True)]


def _pass(network: Network, windows: Sequence[Window]) -> Tensor | None:
    """[b, 2]: each window's log-probability and number of likeliest targets; None on a stage without the head."""
    device = network.context.device
    columns = max(len(window.inputs) for window in windows)
    # Causal attention looks back only, so what fills up the end of a row changes nothing before it.
    tokens = torch.zeros(len(windows), columns, dtype=torch.int64)
    for row, window in enumerate(windows):
        tokens[row, : len(window.inputs)] = torch.as_tensor(window.inputs)
    logits = network.logits(tokens.to(device), Decoding())  # [s, b, v]
    if logits is None:
        return None
    return torch.stack([_row(logits[:, row], window) for row, window in enumerate(windows)]).cpu()


def _row(logits: Tensor, window: Window) -> Tensor:
    """[2] of one row's ``logits`` [s, v]; only those of its targets are normalised, for the others' memory."""
    places = [place for place, target in enumerate(window.targets) if target != IGNORED]
    targets = torch.tensor([window.targets[place] for place in places], device=logits.device)
    chosen = logits[places]
    logprobs = chosen.gather(1, targets[:, None]).squeeze(1) - chosen.logsumexp(1)
    return torch.stack([logprobs.sum(dtype=torch.float64), (chosen.argmax(1) == targets).sum().double()])


def _shared(network: Network, found: Tensor) -> Tensor:
    """Join what the copies found, and give it to all ranks."""
    context = network.context
    values = found.to(context.device)
    if context.topology.stage == network.last:
        context.groups.sum_(values, "replicas")
    return network.share(values).cpu()

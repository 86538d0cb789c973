"""Rotary positions (Su et al. 2021, "RoFormer"), and how they stretch to longer sequences.

Legend: s sequence, b micro batch, n heads, d head size, r rotated features of a head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_run_engine.nn.fused import fuses, rotated
from megatron_run_engine.nn.parameter import build_device
from megatron_run_engine.runtime.sample_cut import held

if TYPE_CHECKING:
    from collections.abc import Iterable

    from megatron_run.contracts import Decoding
    from megatron_run_engine.nn.spec import RopeScaling, TransformerSpec
    from megatron_run_engine.runtime.context import BuildContext


class Rotary(nn.Module):
    """Rotary embedding: rotates the features of position ``i`` by ``i * theta^(-2j/r)``; layers share one table.

    Feature j is paired with feature j + r/2, as in GPT-NeoX and Llama; features from r on stay. ``local`` is the table
    of layers with a window, where those have a base of their own.
    """

    cos: Tensor  # [s, 1, 1, r/2]
    sin: Tensor  # [s, 1, 1, r/2]
    short_cos: Tensor  # [s, 1, 1, r/2], of texts up to ``switch``
    short_sin: Tensor  # [s, 1, 1, r/2]

    def __init__(self, context: BuildContext, spec: TransformerSpec, *, local: bool = False) -> None:
        super().__init__()
        device, self.features = build_device(context), spec.rotated_features
        self.pieces = context.pieces
        theta, scaling = spec.rope_theta, spec.rope_scaling
        if local and spec.window_rope_theta is not None:
            theta, scaling = spec.window_rope_theta, None
        # float64: at long positions fp32 angles lose the digits that distinguish neighbours.
        exponents = torch.arange(0, self.features, 2, dtype=torch.float64, device=device) / self.features
        positions = torch.arange(spec.sequence_length, dtype=torch.float64, device=device)
        frequencies = theta**-exponents
        #: The longest text whose angles are other than those of longer ones; None where all texts have the same.
        self.switch = None if scaling is None else scaling.switch(spec.sequence_length)
        size = 1.0 if scaling is None else scaling.attention_factor
        lengths = {"": spec.sequence_length} | ({} if self.switch is None else {"short_": self.switch})
        for name, length in lengths.items():
            longer = frequencies if scaling is None else scaled(frequencies, scaling, theta, length)
            angles = torch.outer(positions, longer)[:, None, None, :]
            self.register_buffer(f"{name}cos", (angles.cos() * size).to(context.dtypes.param), persistent=False)
            self.register_buffer(f"{name}sin", (angles.sin() * size).to(context.dtypes.param), persistent=False)

    def forward(self, x: Tensor, decoding: Decoding | None = None, positions: Tensor | None = None) -> Tensor:
        """Rotate queries or keys: [s, b, n, d] -> [s, b, n, d]; by default token i is at position i."""
        cos, sin = self._turns(len(x), decoding, positions)  # [s, b or 1, 1, r/2]
        if fuses(x):
            return rotated(x, cos, sin)
        first, second = x[..., : self.features].chunk(2, dim=-1)  # each [s, b, n, r/2]
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(turned if self.features == x.shape[-1] else (*turned, x[..., self.features :]), dim=-1)

    def _turns(self, columns: int, decoding: Decoding | None, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a pass over ``columns`` of this rank. A text has the angles of its length so far."""
        positions = positions if decoding is None else decoding.positions
        start, columns = 0 if decoding is None else decoding.first, columns * self.pieces.ranks
        if positions is None:
            short = self.switch is not None and start + columns <= self.switch
            cos, sin = (self.short_cos, self.short_sin) if short else (self.cos, self.sin)
            cos, sin = cos[start : start + columns], sin[start : start + columns]
            return held(cos, self.pieces), held(sin, self.pieces)
        places = positions.t()  # [s, b]
        cos, sin = self.cos[places, 0], self.sin[places, 0]
        if self.switch is None or (decoding is None and columns > self.switch):
            return cos, sin
        # Texts of a batch end in its last column; packed documents have the angles of their row.
        ends = positions[:, -1] + 1 if decoding is not None else positions.new_full((len(positions),), columns)
        long = (ends > self.switch)[:, None, None]
        return torch.where(long, cos, self.short_cos[places, 0]), torch.where(long, sin, self.short_sin[places, 0])


def rotaries(context: BuildContext, spec: TransformerSpec, layers: Iterable[int]) -> dict[int, Rotary]:
    """The table of each of ``layers`` that rotates, shared where it is the same."""
    tables: dict[bool, Rotary] = {}
    found = {}
    for layer in layers:
        if spec.rotates(layer):
            local = spec.window_rope_theta is not None and spec.window_of(layer) is not None
            if local not in tables:
                tables[local] = Rotary(context, spec, local=local)
            found[layer] = tables[local]
    return found


def scaled(frequencies: Tensor, scaling: RopeScaling, theta: float, length: int) -> Tensor:
    """The ``frequencies`` [r/2], in radians a token, for sequences ``factor`` times as long.

    ``linear`` divides all by the factor (Chen et al. 2023, "Position Interpolation"). The others keep the fast ones:
    ``llama3`` by a ramp over the turns in the original length (Grattafiori et al. 2024, "The Llama 3 Herd of Models",
    as Meta published it), ``yarn`` by a ramp over the features between those that make ``high`` and ``low`` turns
    (Peng et al. 2023, "YaRN", section 3.2). ``longrope`` has found a divisor for each (Ding et al. 2024, "LongRoPE"),
    and others for sequences of a ``length`` no longer than the first ones.
    """
    if scaling.kind == "longrope":
        return frequencies / frequencies.new_tensor(scaling.long if length > scaling.original else scaling.short)
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    if scaling.kind == "llama3":
        turns = scaling.original * frequencies / (2 * math.pi)
        kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    else:
        count = len(frequencies)
        first, last = (_feature_of(turns, scaling.original, theta, count) for turns in (scaling.high, scaling.low))
        first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * count - 1)
        places = torch.arange(count, dtype=frequencies.dtype, device=frequencies.device)
        kept = 1 - ((places - first) / max(last - first, 0.001)).clamp(0, 1)
    return slow + (frequencies - slow) * kept


def _feature_of(turns: float, length: int, theta: float, count: int) -> float:
    """The index of the pair, out of ``count``, that makes so many ``turns`` in ``length`` tokens; between two pairs."""
    return count * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

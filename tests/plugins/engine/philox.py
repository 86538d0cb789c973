"""The default random stream as a GPU has it, with a seed and an offset, on a CPU.

Operations draw from the CPU's stream, which is seeded with it. Kernels that do not go through the dispatcher advance
the offset alone.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from megatron_run_engine.runtime.context import BuildContext

_WORDS = 16  # bytes of a seed and an offset


class Philox:
    """In the place of a CUDA generator."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self._seed = self._offset = 0

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> None:
        self._offset = offset

    def advance(self) -> None:
        """Take what one kernel needs, as it does without drawing anything too."""
        self._offset += 4

    def manual_seed(self, seed: int) -> Philox:
        torch.default_generator.manual_seed(seed)
        self._seed, self._offset = seed, 0
        return self

    def get_state(self) -> Tensor:
        words = torch.tensor([self._seed, self._offset]).view(torch.uint8)
        return torch.cat((torch.default_generator.get_state(), words))

    def set_state(self, state: Tensor) -> Philox:
        torch.default_generator.set_state(state[:-_WORDS].clone())
        self._seed, self._offset = state[-_WORDS:].clone().view(torch.int64).tolist()
        return self


#: The stream from which the attention that stands in for Transformer Engine's takes its offset.
STREAM = Philox()


def draw_from_gpu(context: BuildContext) -> None:
    """Let the run of ``context`` position :data:`STREAM`."""
    context.rng.sharded = cast("torch.Generator", STREAM)

"""data=mock: synthetic sequences with a structure that a model can learn, and a best loss that is known.

The ids lie on a circle in an order drawn from the seed. The next token is the next id on the circle or, with
probability ``NOISE``, any id with equal probability. The next token depends on the last one only, so the best loss is
the entropy of one step,

    H = -(1 - q) log(1 - q) - q log(q / (V - 1)),    q = NOISE (V - 1) / V    (the jumps that land elsewhere).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import log
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import Dataset, DataSource, PluginInfo, Split
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.data.option_types import SPLITS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_run.contracts.schema import Config

#: Probability of a jump.
NOISE = 0.1


class MockOptions(BaseModel):
    """The keys of section ``data`` when it uses mock."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: int = Field(128, ge=2, description="token ids")
    samples: int = Field(10_000, ge=1, description="samples of each split")


class MockDataset:
    """Samples generated on access, as a pure function of (seed, split, index)."""

    def __init__(self, options: MockOptions, split: Split, sequence_length: int, seed: int) -> None:
        self._options, self._split, self._length, self._seed = options, split, sequence_length, seed

    def __len__(self) -> int:
        return self._options.samples

    @cached_property
    def _circle(self) -> NDArray[np.int64]:
        """The ids in the order of the circle, [v], equal for all splits."""
        return np.random.default_rng([self._seed]).permutation(self._options.vocab_size)

    def __getitem__(self, index: int) -> Mapping[str, NDArray[np.generic]]:
        """``tokens`` and ``labels`` int64 [s], ``loss_mask`` fp32 [s]."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        window = self._circle[self._walk(index)]
        return {"tokens": window[:-1], "labels": window[1:], "loss_mask": np.ones(self._length, np.float32)}

    def _walk(self, index: int) -> NDArray[np.int64]:
        """Return positions on the circle, [s + 1]: one step per token since the last jump."""
        generator = np.random.default_rng([self._seed, SPLITS.index(self._split), index])
        steps = np.arange(self._length + 1)
        landing = generator.integers(self._options.vocab_size, size=self._length + 1)
        jumps = generator.random(self._length + 1) < NOISE
        jumps[0] = True  # a sample starts anywhere
        last_jump = np.maximum.accumulate(np.where(jumps, steps, 0))
        walked: NDArray[np.int64] = (landing[last_jump] + steps - last_jump) % self._options.vocab_size
        return walked


class Mock(DataSource):
    """Synthetic samples of any length."""

    def __init__(self, options: MockOptions) -> None:
        self._options = options

    @property
    def vocab_size(self) -> int:
        """``data.vocab_size``."""
        return self._options.vocab_size

    def dataset(self, split: Split, sequence_length: int, seed: int) -> Dataset:
        """Open ``split``. The splits share the circle and nothing else."""
        return MockDataset(self._options, split, sequence_length, seed)

    def baselines(self, sequence_length: int, seed: int, samples: Sequence[int]) -> Mapping[str, float]:
        """Return the loss of a uniform guess, and the entropy, which no model beats except by chance."""
        size = self._options.vocab_size
        elsewhere = NOISE * (size - 1) / size
        entropy = -(1 - elsewhere) * log(1 - elsewhere) - elsewhere * log(elsewhere / (size - 1))
        return {"uniform guess": log(size), "perfect model": entropy}


def check_config(config: Config, _: MockOptions) -> Iterator[str]:
    """Yield a notice if sample text is requested."""
    if config.eval.sample:
        yield f"eval.sample={config.eval.sample} does nothing with data=mock: its tokens are no text"


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Plugin mock of kind data."""
    return PluginInfo("data", "mock", options=MockOptions, check_config=check_config)


@hookimpl
def megatron_run_create_data(options: MockOptions) -> DataSource:
    """Make the source."""
    return Mock(options)

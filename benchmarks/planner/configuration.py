"""A small run that a benchmark of the planner executes, and what may differ in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_run.config.request import Request

SPLIT = "parallel-layer=tensor"


@dataclass(frozen=True)
class Configuration:
    """A run: what differs from four layers of 128 on sequences of ``sequence``, four microbatches of two samples."""

    ranks: int
    plugins: tuple[str, ...] = ()
    sets: dict[str, Any] = field(default_factory=dict)
    sequence: int = 128

    @property
    def name(self) -> str:
        """The differences, in words."""
        words = [f"{self.ranks} rank{'s' if self.ranks > 1 else ''}", *self.plugins]
        return " ".join([*words, *(f"{key.partition('.')[2]}={value}" for key, value in self.sets.items())])

    @property
    def request(self) -> Request:
        """The run as a request."""
        sets: dict[str, Any] = {**sized(128, 4, self.sequence), "train.steps": 1000, "data.vocab_size": 1024}
        sets |= {"eval.interval": 0, "run.threads": 1, "run.device": "cpu", **self.sets}
        texts = tuple(f"{key}={value}" for key, value in sets.items())
        return Request(("preset:tiny",), texts, self.plugins, nproc=self.ranks)


def sized(hidden: int, heads: int, sequence: int = 128, micro_batch: int = 2, batch: int = 8, layers: int = 4) -> Any:
    """The sizes of a model and its batch."""
    return {
        "model.hidden_size": hidden,
        "model.num_heads": heads,
        "train.sequence_length": sequence,
        "train.micro_batch_size": micro_batch,
        "train.global_batch_size": batch,
        "model.num_layers": layers,
    }


def stages(count: int, **more: Any) -> dict[str, Any]:
    """Pipeline stages."""
    return {"parallel.pipeline": count, **{f"parallel.{key}": value for key, value in more.items()}}


FULL, HALF = {"train.recompute": "full"}, {"train.recompute": "mlp"}

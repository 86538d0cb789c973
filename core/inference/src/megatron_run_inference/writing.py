"""How texts are continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_run.errors import InputError
from megatron_run_engine.runtime.generation import Sampling

#: A prompt: text, or token ids where the model has no tokenizer.
Prompt = str | Sequence[int]
#: The most texts for a prompt: all of them are written in one batch.
MOST = 2**16


@dataclass(frozen=True)
class Writing:
    """How texts are continued: the options of :meth:`LoadedModel.generate`.

    At most ``max_new_tokens`` continue each prompt, ``num`` times; temperature 0 takes the likeliest token. ``top_k``,
    ``top_p`` and ``repetition_penalty`` are those of :class:`~megatron_run_engine.runtime.generation.Sampling`. A text
    ends before the first string of ``stop``, at one of ``stop_tokens``, and unless ``past_end`` at a token that ends
    the model's texts (:attr:`LoadedModel.ends`). The same ``seed`` writes the same: alone or in a batch, with the
    ``cache`` or without, on any topology. Raises :class:`InputError` for a value out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    past_end: bool = False
    num: int = 1
    seed: int = 0
    cache: bool = True

    def __post_init__(self) -> None:
        for name, value in (("max_new_tokens", self.max_new_tokens), ("num", self.num)):
            if value < 1:
                raise InputError(f"{name}={value}: it must be at least 1")
        if self.num > MOST:
            raise InputError(f"num={self.num}: it must be at most {MOST}", fix="write more with another seed")
        if "" in self.stops:
            raise InputError("a stop string is empty: every text would end at once")
        _ = self.sampling  # checks its values

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def sampling(self) -> Sampling:
        """How a token is chosen."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.repetition_penalty, self.seed)

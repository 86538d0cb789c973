"""The suite of kind scaler notices one that breaks the contract."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from megatron_run.contracts import Scaler
from megatron_run_testing.scaler import scaler_checks
from tests.contracts.conformance import failures


class Halves(Scaler):
    """Halves its scale at every second overflow, and keeps the contract."""

    def __init__(self) -> None:
        self._scale, self._overflows = torch.full((1,), 2.0**16), torch.zeros(1)

    @property
    def scale(self) -> Tensor:
        return self._scale

    def update(self, found_inf: Tensor) -> None:
        self._overflows += found_inf > 0
        second = self._overflows == 2
        self._overflows.masked_fill_(second, 0)
        self._scale.mul_(torch.where(second, 0.5, 1.0))

    def state_dict(self) -> Mapping[str, float]:
        return {"scale": self._scale.item(), "overflows": int(self._overflows.item())}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._scale.fill_(state["scale"])
        self._overflows.fill_(state["overflows"])


class Moves(Halves):
    """Makes a new tensor, which a captured graph would never see."""

    def update(self, found_inf: Tensor) -> None:
        self._scale = self._scale.clone()
        super().update(found_inf)


class MovesWhenLoaded(Halves):
    def load_state_dict(self, state: Mapping[str, float]) -> None:
        super().load_state_dict(state)
        self._scale = torch.full((1,), state["scale"])


class Counts(Halves):
    """Takes the flag for a number of overflows."""

    def update(self, found_inf: Tensor) -> None:
        self._scale.mul_(0.5 ** found_inf.clamp(max=3))


class Clears(Halves):
    """Uses the trainer's flag up."""

    def update(self, found_inf: Tensor) -> None:
        super().update(found_inf)
        found_inf.zero_()


class Forgets(Halves):
    """Saves the scale and not that an overflow was counted."""

    def state_dict(self) -> Mapping[str, float]:
        return {"scale": self._scale.item()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        super().load_state_dict({**state, "overflows": 0})


class SavesNothing(Halves):
    def state_dict(self) -> Mapping[str, float]:
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        return None


class SavesATensor(Halves):
    def state_dict(self) -> Mapping[str, float]:
        return {"scale": self._scale}  # type: ignore[dict-item]  # what is wrong with it


STORAGE = "scale keeps its storage through updates"
FOUND_INF = "any found_inf above 0 is an overflow and stays unchanged"
JSON = "its state is finite numbers, as JSON can hold"
RESUMED = "a scaler that loads its state continues as it does"


def test_one_that_keeps_it_passes() -> None:
    assert failures(scaler_checks(lambda _: Halves())) == {}


@pytest.mark.parametrize(
    ("scaler", "check", "words"),
    [
        (Moves, STORAGE, "step 0: scale moved to another storage; write into it instead"),
        (MovesWhenLoaded, STORAGE, "load_state_dict moved scale to another storage; write into it instead"),
        (Counts, FOUND_INF, "after found_inf=1 and "),
        (Clears, FOUND_INF, "update changed found_inf, which the trainer reads after it"),
        (Forgets, RESUMED, "without the interruption"),
        (SavesNothing, RESUMED, "saved before step 0: before step 0 scale is 32768.0, and 65536.0 without"),
        (SavesATensor, JSON, "before step 0: the state has scale=tensor("),
    ],
)
def test_one_that_breaks_it_is_named(scaler: type[Halves], check: str, words: str) -> None:
    checks = {each.name: each for each in scaler_checks(lambda _: scaler())}
    (message,) = failures([checks[check]]).values()
    assert words in message

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
        self._scale.mul_(torch.where(second, 0.5, 1.0)).clamp_(min=1)

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


class Sinks(Halves):
    """Halves without a floor."""

    def update(self, found_inf: Tensor) -> None:
        self._scale.mul_(torch.where(found_inf > 0, 0.5, 1.0))


class Climbs(Halves):
    """Grows a little in every clean step, without a ceiling."""

    def update(self, found_inf: Tensor) -> None:
        self._scale.mul_(torch.where(found_inf > 0, 0.5, 1.08)).clamp_(min=1)


class Window(Halves):
    """Doubles after ``window`` clean steps, and forgets in its state how many there were."""

    window = 2000

    def __init__(self) -> None:
        super().__init__()
        self._clean = torch.zeros(1)

    def update(self, found_inf: Tensor) -> None:
        super().update(found_inf)
        self._clean.add_(1).masked_fill_(found_inf > 0, 0)
        full = self._clean == self.window
        self._scale.mul_(torch.where(full, 2.0, 1.0))
        self._clean.masked_fill_(full, 0)


class LongWindow(Window):
    window = 4000


class CountsTheWindow(Window):
    """The same without the fault."""

    def state_dict(self) -> Mapping[str, float]:
        return {**super().state_dict(), "clean": int(self._clean.item())}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        super().load_state_dict(state)
        self._clean.fill_(state["clean"])


SCALE = "scale is fp32 of shape [1], positive and finite"
STORAGE = "scale keeps its storage through updates"
FOUND_INF = "any found_inf above 0 is an overflow and stays unchanged"
JSON = "its state is finite numbers, as JSON can hold"
RESUMED = "a scaler that loads its state continues as it does"


@pytest.mark.parametrize("scaler", [Halves, CountsTheWindow])
def test_one_that_keeps_it_passes(scaler: type[Halves]) -> None:
    assert failures(scaler_checks(lambda _: scaler())) == {}


@pytest.mark.parametrize(
    ("scaler", "check", "words"),
    [
        (Moves, STORAGE, "step 0: scale moved to another storage; write into it instead"),
        (MovesWhenLoaded, STORAGE, "load_state_dict moved scale to another storage; write into it instead"),
        (Counts, FOUND_INF, "after found_inf=1 and "),
        (Clears, FOUND_INF, "update changed found_inf, which the trainer reads after it"),
        (Forgets, RESUMED, "without the interruption"),
        (SavesNothing, RESUMED, "saved before step 0: before step 0 scale is 32768.0, and 65536.0 without"),
        (Window, RESUMED, "saved before step 700: before step 20"),
        (LongWindow, RESUMED, "saved before step 700: before step 40"),
        (Sinks, SCALE, "scale is 0.0, expected a positive finite number"),
        (Climbs, SCALE, "scale is inf, expected a positive finite number"),
        (SavesATensor, JSON, "before step 0: the state has scale=tensor("),
    ],
)
def test_one_that_breaks_it_is_named(scaler: type[Halves], check: str, words: str) -> None:
    checks = {each.name: each for each in scaler_checks(lambda _: scaler())}
    (message,) = failures([checks[check]]).values()
    assert words in message

"""The suite of kind scaler notices one that breaks the contract."""

from __future__ import annotations

import torch

from megatron_run.contracts import Scaler
from megatron_run.testing.scaler import scaler_checks
from tests.support.conformance import failures


class Moves(Scaler):
    """Halves its scale by making a new tensor, which a captured graph would never see."""

    def __init__(self) -> None:
        self._scale = torch.full((1,), 2.0**16)

    @property
    def scale(self) -> torch.Tensor:
        return self._scale

    def update(self, found_inf: torch.Tensor) -> None:
        if found_inf.item():
            self._scale = self._scale / 2


def test_a_scale_that_changes_its_storage_is_rejected() -> None:
    (message,) = failures(scaler_checks(lambda _: Moves())).values()
    assert "scale moved to another storage" in message

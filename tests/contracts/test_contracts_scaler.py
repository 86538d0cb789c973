from __future__ import annotations

import pytest
import torch

from megatron_run.contracts import BuildContext, Scaler
from megatron_run.registry.choose import choose
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run.testing.check import Check, CheckFailed
from megatron_run.testing.scaler import scaler_checks

NAMES = [entry.name for entry in scan().entries if entry.kind == "scaler"]


def make(name: str, context: BuildContext) -> Scaler:
    made: Scaler = load(choose(scan(), "scaler", name, "test"), "test").create(context=context)
    return made


def checks(name: str) -> tuple[Check, ...]:
    return scaler_checks(lambda context: make(name, context))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", range(len(checks("none"))), ids=[check.name for check in checks("none")])
def test_every_installed_scaler_keeps_the_contract(name: str, index: int) -> None:
    checks(name)[index].run()


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
    check = scaler_checks(lambda _: Moves())[2]
    with pytest.raises(CheckFailed, match="scale moved to another storage"):
        check.run()

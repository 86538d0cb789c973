"""A factory that stacks passes on all that it does not change."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from megatron_run.contracts import ParallelLayers, StackedLayers

METHODS = [name for name, found in vars(ParallelLayers).items() if callable(found) and not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
def test_every_call_reaches_the_factory_below_with_its_arguments(name: str) -> None:
    base = mock.Mock()
    made = getattr(StackedLayers(StackedLayers(base)), name)(1, "two", three=3)
    assert base.method_calls == [getattr(mock.call, name)(1, "two", three=3)]
    assert made is getattr(base, name).return_value


def test_a_change_in_the_middle_is_seen_from_above() -> None:
    class Changed(StackedLayers):
        def dropout(self, p: float) -> Any:
            return p

    base = mock.Mock()
    top: Any = StackedLayers(Changed(base))
    assert top.dropout(0.5) == 0.5
    assert top.norm("layernorm", 4) is base.norm.return_value

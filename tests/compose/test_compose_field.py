"""Compositions that kill the silent bugs of the field, which tests/mutants/field.toml plants."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_run_testing.conformance.composition.axes import LEARNED, Sizes
from megatron_run_testing.conformance.composition.compare import compare
from megatron_run_testing.conformance.composition.space import Composition, Space

pytestmark = [pytest.mark.nightly, pytest.mark.multiproc, pytest.mark.timeout(300)]

EXPERTS, PACKED = ("experts", 3), ("data", 1)
#: The ranks, then the chosen options by axis.
CHECKS: dict[str, tuple[Sizes, tuple[tuple[str, int], ...]]] = {
    "tensor": (Sizes(tensor=2), (("qk_norm", 1), ("clip", 0))),
    "full_norms": (Sizes(tensor=2), (("qk_norm", 2),)),
    "sequence": (Sizes(tensor=2), (("sequence", 1),)),
    "tensor_experts": (Sizes(tensor=2), (EXPERTS,)),
    "tensor_experts_bf16": (Sizes(tensor=2), (EXPERTS, ("precision", 1))),
    "experts": (Sizes(data=2, expert=2), (EXPERTS,)),
    "accumulation": (Sizes(data=2), ()),
    "shards": (Sizes(data=2), (("update", 1),)),
    "tokens": (Sizes(data=2), (PACKED, ("loss", 2))),
    "packed_stages": (Sizes(pipeline=4), (PACKED,)),
    "saves": (Sizes(data=2), (("then", 1), ("save", 2))),
}


def composition(sizes: Sizes, choices: tuple[tuple[str, int], ...]) -> Composition:
    space = Space.of_installed()
    return Composition((("ranks", space.splits.index(sizes)), *choices), space)


@pytest.mark.parametrize("name", CHECKS)
def test_field(name: str) -> None:
    (found,) = compare([composition(*CHECKS[name])])
    assert not found.refused
    assert not found.faults, found.faults


def test_checks_name_options_that_there_are() -> None:
    for sizes, choices in CHECKS.values():
        made = composition(sizes, choices)
        assert all(number < len(made.space.axes[name].options) for name, number in choices)
        assert replace(made, choices=()).space.learned[0].name == LEARNED[0].name

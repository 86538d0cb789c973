"""The page on reliability names a test for each fault: it is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from megatron_run.config.faults import FAULTS
from megatron_run.contracts.activity import PhaseName

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text()


def test_each_test_that_is_named_exists() -> None:
    named = re.findall(r"`([a-z_/0-9]+\.py)::(test_[a-z_0-9]+)`", PAGE)
    assert len(named) > 30
    assert not [f"{file}::{name}" for file, name in named if f"\ndef {name}(" not in (TESTS / file).read_text()]


def test_each_fault_of_the_list_names_one() -> None:
    faults = PAGE.partition("## Fault by fault")[2].partition("\n## ")[0].split("\n- ")[1:]
    assert len(faults) > 25
    assert not [fault for fault in faults if "::test_" not in fault]


def test_all_kinds_and_phases_are_told() -> None:
    words = {*FAULTS, *get_args(PhaseName)}
    assert not {word for word in words if f"`{word}`" not in PAGE}

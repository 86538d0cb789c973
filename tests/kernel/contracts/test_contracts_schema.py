from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from megatron_run.contracts.plugin import KINDS
from megatron_run.contracts.schema import (
    CheckpointSection,
    EvalSection,
    ParallelSection,
    PluginSection,
    RunSection,
    TrainSection,
)
from megatron_run.registry.choose import choose
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run_cli.reports.keys import all_keys

GOLDEN = Path(__file__).with_name("options.txt")


def options_table() -> str:
    """Every key of the kernel and of its built-ins with type, bounds and default."""
    catalog = scan()
    entries = [entry for kind in KINDS for entry in catalog.of_kind(kind) if entry.builtin]
    plugins = [load(choose(catalog, entry.kind, f"{entry.distribution}:{entry.name}", ""), "") for entry in entries]
    rows = [
        f"{info.name}{' of ' * bool(info.owner)}{info.owner} | {info.type} | {info.bounds or '-'} | {info.default_text}"
        for info in all_keys(plugins)
    ]
    return "\n".join(rows) + "\n"


def test_the_list_of_options_changes_only_on_purpose() -> None:
    """A key is a promise. After a change that is meant, write the table that pytest shows to options.txt."""
    assert options_table() == GOLDEN.read_text(encoding="utf-8")


def test_every_key_says_what_it_means() -> None:
    for section in (RunSection, TrainSection, ParallelSection, EvalSection, CheckpointSection):
        assert all(field.description for field in section.model_fields.values())


def test_a_configuration_is_frozen_to_the_bottom() -> None:
    train = TrainSection(steps=1, global_batch_size=1)
    with pytest.raises(ValidationError, match="frozen"):
        train.lr = 1.0  # type: ignore[misc]  # that it cannot be set is what is tested
    section = PluginSection(use="adamw", options={"eps": 1e-8})
    with pytest.raises(TypeError):
        section.options["eps"] = 1.0  # type: ignore[index]  # that it cannot be written is what is tested


def test_it_prints_what_differs_from_the_defaults() -> None:
    assert repr(TrainSection(steps=3, global_batch_size=4, lr=1e-3)) == (
        "TrainSection(steps=3, global_batch_size=4, lr=0.001)"
    )

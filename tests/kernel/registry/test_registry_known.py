from __future__ import annotations

from megatron_run.contracts import KINDS
from megatron_run.registry.discover import scan
from megatron_run.registry.known import KNOWN, known_owners, known_plugin, known_providers
from megatron_run.registry.load import load
from tests.support.checkout import PLUGINS


def test_what_is_called_available_is_what_the_tree_holds() -> None:
    assert {known.distribution for known in KNOWN if known.available} == {plugin.name for plugin in PLUGINS}


def test_every_known_plugin_is_named_once_and_of_a_real_kind() -> None:
    assert len({(known.kind, known.name) for known in KNOWN}) == len(KNOWN)
    assert {known.kind for known in KNOWN} <= set(KINDS)


def test_providers_that_exist_come_before_planned_ones() -> None:
    names = [known.name for known in known_providers("parallel.pipeline")]
    assert names == ["1f1b", "interleaved", "gpipe", "zero-bubble"]


def test_options_that_are_listed_are_all_that_a_plugin_has() -> None:
    entries = {(entry.kind, entry.name): entry for entry in scan().entries}
    listed = [known for known in KNOWN if known.options]
    for known in listed:
        options = load(entries[known.kind, known.name], "test").options_model
        assert known.options == tuple(options.model_fields)
    assert {known.name for known in listed} >= {"constant", "dynamic", "zero1", "deepspeed"}


def test_the_owner_of_an_option_is_known() -> None:
    assert [known.name for known in known_owners("scaler", "loss_scale")] == ["constant"]
    assert [known.name for known in known_owners("optimizer", "overlap_param_gather")] == ["zero1"]
    assert known_owners("schedule", "loss_scale") == ()


def test_a_stranger_is_not_known() -> None:
    assert known_plugin("schedule", "zigzag") is None

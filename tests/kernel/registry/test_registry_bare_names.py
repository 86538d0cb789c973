"""A plugin by its name alone: what is meant, or what could be."""

from __future__ import annotations

import pytest

from megatron_run.errors import InputError
from megatron_run.registry.bare_names import called, with_kind
from megatron_run.registry.discover import Catalog, Entry

INSTALLED = Catalog(
    (
        Entry("schedule", "zigzag", "a", "acme-zigzag", "1"),
        Entry("schedule", "zigzag", "b", "zebra-zigzag", "1"),
        Entry("schedule", "ring", "a", "acme-zigzag", "1"),
        Entry("observer", "ring", "a", "acme-zigzag", "1"),
    ),
    (),
    (Entry("command", "losses", "a", "acme-losses", "1"),),
)


@pytest.mark.parametrize(
    ("name", "meant"), [("zigzag", "schedule=zigzag"), ("losses", "command=losses"), ("t5", "model=t5")]
)
def test_a_name_of_one_kind_is_enough_installed_or_of_this_project(name: str, meant: str) -> None:
    assert with_kind(name, INSTALLED, "here") == meant


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ring", "2 plugins are called 'ring' (from here); name schedule=ring or observer=ring"),
        ("zigzagg", "no plugin is called 'zigzagg' (from here); did you mean schedule=zigzag? megatron-run plugins"),
        ("rings", "did you mean schedule=ring or observer=ring?"),
        ("scheduel", "did you mean schedule?"),
        ("schedule", "'schedule' is a kind of plugins (from here); name one of schedule=ring, schedule=zigzag"),
        ("parallel_layer", "'parallel_layer' is a kind of plugins (from here); name one of them"),
        ("qqqqqq", "no plugin is called 'qqqqqq' (from here); megatron-run plugins list shows all"),
    ],
)
def test_what_could_be_meant_is_listed(name: str, line: str) -> None:
    with pytest.raises(InputError) as caught:
        with_kind(name, INSTALLED, "here")
    assert line in str(caught.value)


def test_each_is_listed_once() -> None:
    assert called("zigzag", INSTALLED) == ("schedule=zigzag",)
    assert called("", INSTALLED) == ()

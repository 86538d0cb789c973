from __future__ import annotations

from megatron_run.contracts import KINDS
from megatron_run.registry.known import KNOWN, known_plugin, known_providers


def test_every_known_plugin_is_named_once_and_of_a_real_kind() -> None:
    assert len({(known.kind, known.name) for known in KNOWN}) == len(KNOWN)
    assert {known.kind for known in KNOWN} <= set(KINDS)


def test_providers_are_the_packages_that_have_the_ability() -> None:
    names = [known.name for known in known_providers("parallel.pipeline")]
    assert names == ["1f1b", "gpipe", "interleaved", "zero-bubble"]


def test_a_stranger_is_not_known() -> None:
    assert known_plugin("schedule", "zigzag") is None

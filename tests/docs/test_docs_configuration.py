"""The reference of the configuration names every key, with the type, default and meaning that the models have."""

from __future__ import annotations

from dataclasses import replace

from tests.docs.key_tables import REFERENCE, names, refreshed, tables


def test_the_reference_is_what_the_models_say() -> None:
    page = REFERENCE.read_text(encoding="utf-8")
    assert refreshed(page, tables()) == page, "run make docs"


def test_the_reference_shows_every_key_once() -> None:
    assert sorted(names(REFERENCE.read_text(encoding="utf-8"))) == sorted(tables())


def test_a_changed_default_is_found() -> None:
    page, known = REFERENCE.read_text(encoding="utf-8"), tables()
    first, *others = known["train"]
    assert refreshed(page, {**known, "train": [replace(first, default="17"), *others]}) != page

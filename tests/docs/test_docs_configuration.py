"""Every key is documented once: those of the kernel in the reference, options of plugins in their packages' READMEs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.docs.key_tables import BUILT_IN, REFERENCE, names, refreshed, tables
from tests.support.checkout import PLUGINS

PACKAGES = {"=".join(member.folder.parts[-2:]): member.folder / "README.md" for member in PLUGINS}
#: A row of a README's table of options: its options, and their defaults.
ROW = re.compile(r"^\| (`[\w.]+`(?:, `[\w.]+`)*) \| ([^|]*) \|", re.MULTILINE)


@pytest.mark.parametrize("file", [REFERENCE, BUILT_IN], ids=lambda file: file.name)
def test_the_reference_is_what_the_models_say(file: Path) -> None:
    page = file.read_text(encoding="utf-8")
    assert refreshed(page, tables()) == page, "run make docs"


def test_the_reference_shows_every_key_of_what_is_built_in_once() -> None:
    page, options = (file.read_text(encoding="utf-8") for file in (REFERENCE, BUILT_IN))
    in_a_sentence = {"version"}
    assert sorted(names(page) + names(options)) == sorted(tables().keys() - PACKAGES.keys() - in_a_sentence)
    assert [name for name in names(page) if "=" in name] == []
    assert "`version`, the schema's, is 1." in page


@pytest.mark.parametrize("name", sorted(tables().keys() & PACKAGES.keys()))
def test_a_readme_has_every_option_with_its_default(name: str) -> None:
    page = PACKAGES[name].read_text(encoding="utf-8")
    told = told_defaults(page)
    base = re.search(r"All options of `(\w+)` apply", page)
    inherited = tables()[f"{name.partition('=')[0]}={base[1]}"] if base else []
    options = {key.name.partition(".")[2]: key.default_text for key in tables()[name] if key not in inherited}
    assert options.keys() == told.keys() & options.keys()
    assert not [
        (option, told[option], default) for option, default in options.items() if not same(told[option], default)
    ]


def told_defaults(page: str) -> dict[str, str]:
    """Option -> its default in the tables of ``page``; a row of several options has a default for each."""
    found: dict[str, str] = {}
    for cell, defaults in ROW.findall(page):
        options = re.findall(r"[\w.]+", cell)
        each = defaults.split(", ") if len(options) > 1 else [defaults]
        found.update(zip(options, each, strict=False))  # a table of something else may have fewer
    return found


def same(told: str, default: str) -> bool:
    """Whether a README's default is the model's: a power may be written as one, and words say what unset means."""
    plain, power = told.strip("`"), re.fullmatch(r"2\^(\d+)", told)
    if default in ("unset", "[]"):
        return True
    if power:
        return float(default) == 2.0 ** int(power[1])
    return plain.replace("1e-8", "1e-08") == re.sub(r'[]["]', "", default)


def test_a_changed_default_is_found() -> None:
    page, known = REFERENCE.read_text(encoding="utf-8"), tables()
    first, *others = known["train"]
    assert refreshed(page, {**known, "train": [replace(first, default="17"), *others]}) != page
    assert not same("`h1`", "v")
    assert told_defaults("| `a`, `b` | 0, false | x |\n") == {"a": "0", "b": "false"}

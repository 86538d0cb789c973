"""There is one way from the sources of a configuration to the one that a run takes: ``planning.taken``."""

from __future__ import annotations

import re

from tests.architecture.test_architecture_sources import SOURCES
from tests.support.checkout import ROOT

_KERNEL = "core/kernel/src/megatron_run"
TAKEN = f"{_KERNEL}/planning/taken.py"
#: Who reads the sources alone, and for what.
ALONE = {
    f"{_KERNEL}/config/sources.py": "reads them",
    f"{_KERNEL}/planning/input_files.py": "the files that were named, whatever a run makes of them",
}


def users(*names: str) -> set[str]:
    """The modules that name one of ``names``."""
    pattern = re.compile(rf"\b({'|'.join(names)})\(")
    return {str(file.relative_to(ROOT)) for file in SOURCES if pattern.search(file.read_text(encoding="utf-8"))}


def test_what_plugins_suggest_and_decide_is_applied_in_one_place() -> None:
    owners = {f"{_KERNEL}/planning/choosing.py", f"{_KERNEL}/planning/decided.py"}
    assert users("apply_suggestions", "apply_decided") - owners == {TAKEN}


def test_who_reads_a_configuration_takes_it_as_a_run_does() -> None:
    readers = users("read_sources") - ALONE.keys()
    assert readers
    assert readers - users("take") == set()
    assert ALONE.keys() <= users("read_sources"), "an exception that nobody needs is none"

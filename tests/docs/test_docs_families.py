"""The page of formats says of each family of Hugging Face what the tests prove."""

from __future__ import annotations

from megatron_run_format_huggingface.families import FAMILIES
from tests.docs.family_table import PAGE, refreshed
from tests.plugins.format.huggingface.family_cases import CASES


def test_the_table_of_families_is_what_the_tests_prove() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert refreshed(page) == page, "run make docs"
    assert {case.family for case in CASES.values()} == FAMILIES.keys()

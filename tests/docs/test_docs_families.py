"""The page of formats says of each family of Hugging Face what the tests prove, and how to add one."""

from __future__ import annotations

import re

from megatron_run_format_huggingface.families import FAMILIES
from megatron_run_format_huggingface.family import Family
from tests.docs.family_table import PAGE, refreshed
from tests.plugins.format.huggingface.family_cases import CASES


def test_the_table_of_families_is_what_the_tests_prove() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert refreshed(page) == page, "run make docs"
    assert {case.family for case in CASES.values()} == FAMILIES.keys()


def test_the_family_of_the_page_is_the_one_that_is_installed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    code = re.search(r"```python\n(# .*/mistral\.py\n.*?)```", page, re.DOTALL)
    assert code is not None
    names: dict[str, object] = {}
    exec(compile(code[1], "mistral.py", "exec"), names)  # the page's own example
    made = names["MISTRAL"]
    assert isinstance(made, Family)
    assert made._replace(sections=()) == FAMILIES["mistral"]._replace(sections=())

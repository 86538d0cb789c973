"""The README of format=megatron tells of every flag what the code does with it."""

from __future__ import annotations

from megatron_run_format_megatron.launch_script.flags.kinds import Verdict
from tests.docs.flag_tables import PAGE, names, refreshed


def test_the_tables_are_what_the_code_does() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert refreshed(page) == page, "run make docs"


def test_every_table_is_shown_once() -> None:
    assert sorted(names(PAGE.read_text(encoding="utf-8"))) == sorted(verdict.name for verdict in Verdict)


def test_a_stale_row_is_found() -> None:
    page = PAGE.read_text(encoding="utf-8")
    stale = page.replace("  train.clip_norm\n", "  train.clip\n")
    assert stale != page
    assert refreshed(stale) == page

"""The tables of Megatron-LM's flags are made from the table that reads them, between markers on their page.

A table is the marker ``<!-- flags: VERDICT -->`` on a line of its own, followed by rows. ``make docs`` brings every
table up to date; a test fails where one is not.
"""

from __future__ import annotations

import re

from megatron_run_format_megatron.flags import FLAGS, Verdict
from tests.support.checkout import ROOT

PAGE = ROOT / "docs" / "from-megatron.md"

_HEADS = {Verdict.TAKEN: "| flag | key |", Verdict.SAME: "| flag | here |"}
_TABLE = re.compile(r"<!-- flags: (?P<name>\w+) -->\n\n(?:\|.*\n)*")


def names(page: str) -> list[str]:
    """The tables that ``page`` shows, in order."""
    return [match["name"] for match in _TABLE.finditer(page)]


def refreshed(page: str) -> str:
    """``page`` with every table as the code has it."""
    return _TABLE.sub(lambda match: f"<!-- flags: {match['name']} -->\n\n{_table(Verdict[match['name']])}", page)


def _table(verdict: Verdict) -> str:
    """A row for each text, with all flags that it answers."""
    flags: dict[str, list[str]] = {}
    for flag in (flag for flag in FLAGS if flag.verdict is verdict):
        same = f" (not with {flag.same})" if flag.same else ""
        flags.setdefault(flag.text, []).append(f"`{flag.name}`{same}")
    rows = [_HEADS.get(verdict, "| flag | why |"), "|---|---|"]
    for text, names in flags.items():
        keys = ", ".join(f"`{key}`" for key in text.split(", ")) if verdict is Verdict.TAKEN else text
        rows.append(f"| {', '.join(names)} | {keys} |")
    return "".join(f"{row}\n" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

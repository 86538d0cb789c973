"""The table of Hugging Face's families is made from what the tests prove, after a marker on its page.

``make docs`` brings it up to date; a test fails where it is not.
"""

from __future__ import annotations

import re

from tests.plugins.format.huggingface.family_cases import table
from tests.support.checkout import ROOT

PAGE = ROOT / "docs" / "interchange.md"

_TABLE = re.compile(r"(?<=<!-- families -->\n\n)(?:\|.*\n)*")


def refreshed(page: str) -> str:
    """``page`` with the table as the tests are now. Raises ValueError for a page without the marker."""
    found, count = _TABLE.subn(table(), page)
    if count != 1:
        raise ValueError(f"{PAGE.name} has {count} markers of the table, expected 1")
    return found


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""Pages of the documentation quote files of the repository between markers; this keeps the quotes true.

A quote is the marker ``<!-- file: PATH -->`` on a line of its own, followed by a code block. ``make docs`` brings every
quote up to date; a test fails where one is not.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.checkout import MEMBERS, ROOT

_QUOTE = re.compile(
    r"<!-- file: (?P<path>\S+) -->\n\n?```(?P<language>\w*)\n(?P<code>.*?)\n```$", re.DOTALL | re.MULTILINE
)


def quotes(page: str) -> dict[str, str]:
    """Path -> the code that ``page`` shows for it."""
    return {match["path"]: match["code"] for match in _QUOTE.finditer(page)}


def refreshed(page: str) -> str:
    """``page`` with every quote as its file is now."""

    def quote(match: re.Match[str]) -> str:
        code = (ROOT / match["path"]).read_text(encoding="utf-8").rstrip("\n")
        return f"<!-- file: {match['path']} -->\n\n```{match['language']}\n{code}\n```"

    return _QUOTE.sub(quote, page)


def pages() -> list[Path]:
    """Every page that may quote."""
    front = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*front, *sorted((ROOT / "docs").rglob("*.md")), *(member.folder / "README.md" for member in MEMBERS)]


if __name__ == "__main__":
    for file in pages():
        file.write_text(refreshed(file.read_text(encoding="utf-8")), encoding="utf-8")

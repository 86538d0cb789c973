"""The lists of Megatron-LM's flags are made from the table that reads them, between markers on their page.

A list is the marker ``<!-- flags: VERDICT -->`` on a line of its own, followed by one line a reason; that of the flags
which become keys is a block of code with one line a flag. ``make docs`` brings every list up to date; a test fails
where one is not.
"""

from __future__ import annotations

import re

from megatron_run_format_megatron.launch_script.flags import FLAGS
from megatron_run_format_megatron.launch_script.flags.kinds import Verdict
from tests.support.checkout import ROOT

PAGE = ROOT / "plugins" / "format" / "megatron" / "README.md"

_LIST = re.compile(r"<!-- flags: (?P<name>\w+) -->\n\n(?:- .*\n|```text\n(?:--.*\n)*```\n)*")


def names(page: str) -> list[str]:
    """The lists that ``page`` shows, in order."""
    return [match["name"] for match in _LIST.finditer(page)]


def refreshed(page: str) -> str:
    """``page`` with every list as the code has it."""
    return _LIST.sub(lambda match: f"<!-- flags: {match['name']} -->\n\n{_list(Verdict[match['name']])}", page)


def _list(verdict: Verdict) -> str:
    """A line for each flag that becomes a key; else a line for each text, with all flags that it answers."""
    listed = [flag for flag in FLAGS if flag.verdict is verdict]
    if verdict is Verdict.TAKEN:
        width = max(len(flag.name) for flag in listed)
        return "```text\n" + "".join(f"{flag.name:{width}}  {flag.text}\n" for flag in listed) + "```\n"
    flags: dict[str, list[str]] = {}
    for flag in listed:
        same = f" (not with {flag.same})" if flag.same else ""
        flags.setdefault(flag.text, []).append(f"`{flag.name}`{same}")
    return "".join(f"- {', '.join(names)}: {text}\n" for text, names in flags.items())


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""The reference of the configuration is made from the models themselves, between markers on its pages.

A list is the marker ``<!-- keys: NAME -->`` on a line of its own, followed by a line a key. NAME is a section
(``train``), ``use`` for the choice of each kind's plugin, or ``KIND=PLUGIN`` for the options of a built-in plugin, in
the engine's README; a package's README has its own. ``NAME of default`` shows defaults alone. A value is a type with
its bounds (alone: of an int), or the words to choose from; the default is bold. ``make docs`` brings every list up
to date; a test fails where one is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from megatron_run.config.origin import section_of
from megatron_run_cli.reports.keys import KeyInfo, installed_plugins, kernel_keys, model_keys
from tests.support.checkout import MEMBERS, ROOT

REFERENCE = ROOT / "docs" / "configuration.md"
BUILT_IN = ROOT / "core" / "engine" / "README.md"

#: What the command says in words, as a line has it.
_SHORT = {"true or false": "bool", "one of ": "", "at least ": ">=", "at most ": "<=", "above ": ">", "below ": "<"}
#: Defaults of keys that are not set.
_NOTHING = ("unset", "[]", "{}", '""')
_LIST = re.compile(r"<!-- keys: (?P<name>\S+)(?P<short> of default)? -->\n\n(?:- .*\n)*\n*(?P<last>\Z)?")


def tables() -> dict[str, list[KeyInfo]]:
    """Name of a list -> its keys: those of the kernel, and the options of every plugin of this repository."""
    found: dict[str, list[KeyInfo]] = {}
    for info in kernel_keys():
        section, _, key = info.name.partition(".")
        name = "use" if key == "use" else section
        found.setdefault(name, []).append(info)
    ours = {member.name for member in MEMBERS}
    for plugin in installed_plugins()[0]:
        options = list(model_keys(plugin.options_model, (section_of(plugin.kind),)))
        if plugin.distribution in ours and options:
            found[f"{plugin.kind}={plugin.name}"] = options
    return found


def names(page: str) -> list[str]:
    """The lists that ``page`` shows, in order."""
    return [match["name"] for match in _LIST.finditer(page)]


def refreshed(page: str, known: Mapping[str, Iterable[KeyInfo]]) -> str:
    """``page`` with every list as the models are now, and an empty line after each but the last.

    Raises KeyError for a list that is not in ``known``.
    """

    def lines(match: re.Match[str]) -> str:
        line = _default if match["short"] else _whole
        marker, after = match[0].partition("\n")[0], "\n" if match["last"] is None else ""
        listed = "".join(f"- {line(info)}\n" for info in known[match["name"]])
        return f"{marker}\n\n{listed}{after}"

    return _LIST.sub(lines, page)


def _default(info: KeyInfo) -> str:
    return f"`{info.name}`: {info.default_text}"


def _whole(info: KeyInfo) -> str:
    meaning = info.description.replace("*", r"\*")
    return f"`{info.name}` ({_value(info)}) {meaning}"


def _value(info: KeyInfo) -> str:
    """``>=1, **2**`` for an int; ``**auto**, cpu``, where the default is one of the words; ``**true**`` for a bool."""
    kind = info.kind
    for words, short in _SHORT.items():
        kind = kind.replace(words, short)
    kind = re.sub(r"^([a-z ]+), (?=[<>])", r"\1 ", kind)
    kind = re.sub(r"^int (?=[<>])", "", kind)
    default = info.default_text
    if default in _NOTHING:
        return kind
    if kind == "bool":
        return f"**{default}**"
    among = re.compile(rf"(?:(?<![\w ])|(?<=, )){re.escape(default)}(?!\w)")
    bold = f"**`{default}`**" if default.startswith("[") else f"**{default}**"
    return among.sub(bold, kind) if among.search(kind) else f"{kind}, {bold}"


if __name__ == "__main__":
    for file in (REFERENCE, BUILT_IN):
        file.write_text(refreshed(file.read_text(encoding="utf-8"), tables()), encoding="utf-8")

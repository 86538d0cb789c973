"""The reference of the configuration is made from the models themselves, between markers on its page.

A table is the marker ``<!-- keys: NAME -->`` on a line of its own, followed by rows. NAME is a section (``train``),
``use`` for the choice of each kind's plugin, or ``KIND=PLUGIN`` for the options of a built-in plugin; a
package's README has its own. ``NAME of key, default`` shows these columns alone. A value is a type with its bounds, or
the words to choose from; the default is bold. ``make docs`` brings every table up to date; a test fails where one is
not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from megatron_run.config.origin import section_of
from megatron_run_cli.reports.keys import KeyInfo, installed_plugins, kernel_keys, model_keys
from tests.support.checkout import MEMBERS, ROOT

REFERENCE = ROOT / "docs" / "configuration.md"

_COLUMNS = ("key", "value", "meaning")
#: What the command says in words, as a column has it.
_SHORT = {"true or false": "bool", "one of ": "", "at least ": ">=", "at most ": "<=", "above ": ">", "below ": "<"}
#: Defaults of keys that are not set.
_NOTHING = ("unset", "[]", "{}", '""')
_TABLE = re.compile(r"<!-- keys: (?P<name>\S+)(?: of (?P<columns>[\w, ]+))? -->\n\n(?:\|.*\n)*\n*(?P<last>\Z)?")


def tables() -> dict[str, list[KeyInfo]]:
    """Name of a table -> its keys: those of the kernel, and the options of every plugin of this repository."""
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
    """The tables that ``page`` shows, in order."""
    return [match["name"] for match in _TABLE.finditer(page)]


def refreshed(page: str, known: Mapping[str, Iterable[KeyInfo]]) -> str:
    """``page`` with every table as the models are now, and an empty line after each but the last.

    Raises KeyError for a table that is not in ``known``.
    """

    def table(match: re.Match[str]) -> str:
        marker, after = match[0].partition("\n")[0], "\n" if match["last"] is None else ""
        columns = match["columns"].split(", ") if match["columns"] else _COLUMNS
        return f"{marker}\n\n{_table(known[match['name']], columns)}{after}"

    return _TABLE.sub(table, page)


def _table(keys: Iterable[KeyInfo], columns: Sequence[str]) -> str:
    rows = "".join(f"| {' | '.join(cells[column] for column in columns)} |\n" for cells in map(_cells, keys))
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n{rows}"


def _cells(info: KeyInfo) -> dict[str, str]:
    cells = {
        "key": f"`{info.name}`",
        "value": _value(info),
        "default": info.default_text,
        "meaning": info.description,
    }
    return {column: text.replace("|", r"\|") for column, text in cells.items()}


def _value(info: KeyInfo) -> str:
    """``int >=1, **2**``; ``**auto**, cpu``, where the default is one of the words; ``**true**`` for a bool."""
    kind = info.kind
    for words, short in _SHORT.items():
        kind = kind.replace(words, short)
    kind = re.sub(r"^([a-z ]+), (?=[<>])", r"\1 ", kind)
    default = info.default_text
    if default in _NOTHING:
        return kind
    if kind == "bool":
        return f"**{default}**"
    among = re.compile(rf"(?:(?<![\w ])|(?<=, )){re.escape(default)}(?!\w)")
    bold = f"**`{default}`**" if default.startswith("[") else f"**{default}**"
    return among.sub(bold, kind) if among.search(kind) else f"{kind}, {bold}"


if __name__ == "__main__":
    REFERENCE.write_text(refreshed(REFERENCE.read_text(encoding="utf-8"), tables()), encoding="utf-8")

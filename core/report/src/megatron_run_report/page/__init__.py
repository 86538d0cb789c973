"""The page: one HTML file with its styles, its pictures and one small script, which asks the network for nothing.

Its policy forbids whatever it does not bring itself, and every text of a run is escaped: by Jinja, in which nothing is
marked as safe but pictures of ours.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from megatron_run.contracts.observer import STEP_CURVES
from megatron_run.drawing.chart import Line, chart
from megatron_run.drawing.curve import Curve
from megatron_run.drawing.sheet import LETTERS, STYLE
from megatron_run.files.foreign_file import open_file
from megatron_run_engine.run_folder.plotting import QUANTITIES, Kind, evaluation_kind
from megatron_run_report.drawing.ranks import legend
from megatron_run_report.numbers import amount, differences, lines_of, summary
from megatron_run_report.page.described import described
from megatron_run_report.record import Record

#: How every report begins.
_BEGIN = '<!doctype html>\n<!-- a report of megatron-run -->\n<html lang="en">'
#: Curves that are drawn only where they vary: most runs have one value.
_VARYING = frozenset({"loss_scale", "skipped_total"})
#: The most pictures of curves that plugins add.
_OWN = 24
#: The most keys in which two runs differ: those of two models do in nearly all.
_KEYS = 500
#: The most characters of a text of a run: of a message, a sample, a configuration.
_TEXT = 20_000


class Figure(NamedTuple):
    """A picture of curves with its title, and a row of numbers for each run."""

    title: str
    picture: Markup
    rows: tuple[tuple[str, ...], ...]


def is_report(file: Path) -> bool:
    """Whether ``file`` is an earlier report, which a new one may replace."""
    try:
        with open_file(file) as opened:
            return opened.read(len(_BEGIN.encode())) == _BEGIN.encode()
    except OSError:
        return False


def page(records: Sequence[Record]) -> str:
    """The page about one run or two, as the text of an HTML file. Raises :class:`InputError` for unreadable files."""
    found = [summary(record) for record in records]
    names = [each.run for each in found]
    script = _own("hover.js")
    content = {
        "begin": Markup(_BEGIN),
        "title": " and ".join(names),
        "names": names,
        "letters": LETTERS[: len(records)],
        "legend": legend(LETTERS[: len(records)], names),
        "style": Markup(STYLE + _own("page.css")),
        "script": Markup(script),
        "digest": b64encode(sha256(script.encode()).digest()).decode(),
        "made": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "numbers": _table([lines_of(each) for each in found]),
        "figures": [*_figures(records)],
        "own_figures": [*_own_figures(records)],
        "runs": [described(record) for record in records],
        "differences": dict(islice(differences(records).items(), _KEYS)),
    }
    template = _environment().from_string(_own("page.html"))
    return template.render(content) + "\n"


def _environment() -> Environment:
    return Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )


def _shown(value: Any) -> Any:
    """A value as the page shows it: of a text of somebody else's only what can be shown, and not without end."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    cut = value if len(value) <= _TEXT else f"{value[:_TEXT]}\N{HORIZONTAL ELLIPSIS}"
    if cut.isprintable():
        return cut
    return "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in cut)


def _own(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _table(columns: Sequence[Any]) -> dict[str, list[str]]:
    """Rows by name, of mappings side by side."""
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name, "") for column in columns] for name in names}


def _figures(records: Sequence[Record]) -> Iterator[Figure]:
    for name, kind in QUANTITIES.items():
        curves = [record.metrics.curves.get(name) for record in records]
        if name in _VARYING and not any(curve and curve.lowest.value != curve.highest.value for curve in curves):
            continue
        figure = _figure(kind, curves)
        if figure is not None:
            yield figure
        if name == "loss":
            yield from _evaluation_figures(records)


def _evaluation_figures(records: Sequence[Record]) -> Iterator[Figure]:
    """The losses of each split, and the metrics that tasks have beside them."""
    for split in dict.fromkeys(split for record in records for split in record.evaluations):
        found = [record.evaluations[split].curves if split in record.evaluations else {} for record in records]
        names = dict.fromkeys(name for curves in found for name in curves)
        for name in [name for name in names if name not in ("perplexity", "tokens")][:_OWN]:
            figure = _figure(evaluation_kind(split, name), [curves.get(name) for curves in found])
            if figure is not None:
                yield figure


def _own_figures(records: Sequence[Record]) -> Iterator[Figure]:
    """The curves that plugins and the model report."""
    known = {*STEP_CURVES.values(), *QUANTITIES, "microbatches", "samples"}
    names = dict.fromkeys(name for record in records for name in record.metrics.curves if name not in known)
    for name in [*names][:_OWN]:
        figure = _figure(Kind(name, ""), [record.metrics.curves.get(name) for record in records])
        if figure is not None:
            yield figure


def _figure(kind: Kind, curves: Sequence[Curve | None]) -> Figure | None:
    lines = [
        Line(run, LETTERS[run] if len(curves) > 1 else "", curve, kind.how)
        for run, curve in enumerate(curves)
        if curve is not None
    ]
    if not lines:
        return None
    rows = tuple(
        (LETTERS[run] if len(curves) > 1 else "", *_numbers(curve)) for run, curve in enumerate(curves) if curve
    )
    picture = chart(kind.title, kind.unit, lines, may_log=kind.may_log, from_zero=kind.from_zero)
    return Figure(kind.title, Markup(picture), rows)


def _numbers(curve: Curve) -> Iterator[str]:
    for at in (curve.last, curve.lowest, curve.highest):
        yield f"{amount(at.value)} at {at.step:,}"
    yield amount(curve.mean)

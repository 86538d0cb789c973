"""A translated script as YAML with comments: where each value came from, and below what no key says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_run.config.megatron.flag import Verdict
from megatron_run.config.megatron.translate import Note, Translation
from megatron_run.config.yaml_text import flow

_TOLD = (Verdict.DIFFERS, Verdict.ABSENT, Verdict.SAME)
_WIDTH = 40  # columns before a comment


def yaml(translation: Translation, name: str) -> str:
    """A configuration file that resolves, made from the script ``name``."""
    reasons = {setting.key: setting.why for setting in translation.settings}
    lines = [f"# Made from {name} by `megatron-run config from-megatron`."]
    lines += _lines(translation.sections, "", reasons)
    notes = [(verdict.value, translation.notes[verdict]) for verdict in _TOLD]
    notes[1:1] = [("is for you to fill in", translation.open), ("is not known", translation.unknown)]
    for heading, each in notes:
        lines += _comment(f"What {heading}:", each)
    lines += _comment("About the script:", [Note(problem, "") for problem in translation.problems])
    return "".join(f"{line}\n" for line in lines)


def _lines(data: Mapping[str, Any], prefix: str, reasons: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _lines(value, f"{key}.", reasons)
        else:
            line = f"{indent}{name}: {flow(value)}"
            yield f"{line:{_WIDTH}}  # {reasons[key]}" if key in reasons else line


def _comment(heading: str, notes: Iterable[Note]) -> list[str]:
    """A heading and a line a note, all comments; nothing where there is no note."""
    told = [f"#   {note.flag}: {note.text}" if note.text else f"#   {note.flag}" for note in notes]
    return ["#", f"# {heading}", *(line.replace("\n", " ") for line in told)] if told else []

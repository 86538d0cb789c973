"""The records of one run as texts for the page. Nothing is trusted: a record may be anybody's JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from shlex import join
from typing import Any

from megatron_run.registry.choose import is_file
from megatron_run_report.drawing.ranks import ranks_drawn, ranks_text
from megatron_run_report.drawing.step import step_drawn
from megatron_run_report.numbers import amount, short
from megatron_run_report.record import Record

#: The most rows of a table.
_ROWS = 100
#: No device does as many TFLOP/s.
_GREATEST = 1e12


def described(record: Record) -> dict[str, Any]:
    """All that the page shows of one run by itself, by the names that its template has."""
    topology = record.plan.get("topology")
    topology = topology if isinstance(topology, dict) else {}
    status = record.status
    counts = [each.get("microbatches") for each in _mappings(record.plan.get("plans"))]
    planned = max((count for count in counts if type(count) is int and count > 0), default=record.metrics.microbatches)
    return {
        "name": record.name,
        "folder": str(record.folder.absolute()),
        "state": record.state,
        "message": status.message if status and isinstance(status.message, str) else "",
        "exit_code": status.exit_code if status else None,
        "ranks": ranks_drawn(topology),
        "ranks_text": ranks_text(topology),
        "step": step_drawn(_step_keys(record, topology), planned),
        "plans": [_plan(each) for each in _mappings(record.plan.get("plans"))][:8],
        "plugins": [*_plugins(record)][:_ROWS],
        "notices": [str(each) for each in _sequence(record.plan.get("notices"))][:40],
        "samples": [(each.get("step"), str(each.get("text", ""))) for each in reversed(record.samples)],
        "attempts": record.attempts,
        "attempt_rows": [_attempt_row(attempt.number, attempt.entry) for attempt in record.attempts],
        "saved": record.saved,
        "skipped": record.metrics.skipped,
        "changes": [
            (step, key, *_pair(value)) for step, changes in record.metrics.changes for key, value in changes.items()
        ][:_ROWS],
        "damaged": record.metrics.damaged,
        "environment": _environment_rows(record),
        "packages": record.environment.get("packages"),
        "variables": record.environment.get("variables"),
        "config": record.config_text,
    }


def _step_keys(record: Record, topology: Mapping[str, Any]) -> dict[str, Any]:
    """The keys by which the step was planned.

    With ``run.elastic=plan`` the configuration says what was typed, and the plan what the ranks that were there got.
    """
    keys, plugins = record.keys, record.plan.get("plugins")
    chosen = _mappings(plugins.get("schedule")) if isinstance(plugins, dict) else []
    if keys.get("run.elastic") != "plan" or not chosen or is_file(str(keys.get("schedule.use"))):
        return keys
    kept = {key: value for key, value in keys.items() if not key.startswith("schedule.")}
    options = chosen[0].get("options")
    schedule = {"use": chosen[0].get("name"), **(options if isinstance(options, dict) else {})}
    split = {f"parallel.{name}": topology[name] for name in ("pipeline", "chunks") if name in topology}
    return {**kept, **split, **{f"schedule.{name}": value for name, value in schedule.items()}}


def _plan(each: dict[str, Any]) -> str:
    bubble, flight = each.get("bubble"), each.get("peak_in_flight")
    waits = f"bubble {bubble:.1%}" if isinstance(bubble, float) else ""
    held = f"in flight at most {short(', '.join(map(str, flight)))} by stage" if isinstance(flight, list) else ""
    return ", ".join(filter(None, (f"step of {short(each.get('microbatches'))} microbatches", waits, held)))


def _plugins(record: Record) -> Iterator[tuple[str, str, str]]:
    chosen = record.plan.get("plugins")
    for kind, stack in chosen.items() if isinstance(chosen, dict) else ():
        for each in _mappings(stack):
            yield (
                str(kind),
                short(each.get("name", "")),
                f"{short(each.get('distribution', ''))} {short(each.get('version', ''))}",
            )


def _attempt_row(number: int, entry: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """The cells of an attempt, and the command that was typed."""
    arguments = [str(each) for each in _sequence(entry.get("arguments"))]
    git = entry.get("git")
    git = git if isinstance(git, dict) else {}
    commit = f"{str(git.get('commit', ''))[:12]}{' (changed)' if git.get('changed') else ''}"
    begun = entry.get("step")
    cells = (
        str(number),
        short(entry.get("time", "")),
        short(entry.get("host", "")),
        short(entry.get("ranks", "")),
        "" if begun is None else short(begun),
        commit,
    )
    return cells, join(["megatron-run", *arguments]) if arguments else ""


def _environment_rows(record: Record) -> dict[str, str]:
    device, about = record.device, record.environment
    tflops = device.get("peak_tflops")
    peak = float(tflops) if isinstance(tflops, int | float) and abs(tflops) < _GREATEST else None
    packages = about.get("packages")
    found = {
        "device": short(device.get("name", ""), 120),
        "precision": short(device.get("precision", "")),
        "peak": "" if peak is None else f"{amount(peak)} TFLOP/s ({short(device.get('peak_source'))})",
        "host": short(about.get("host", "")),
        "cores": short(about.get("cores", "")),
        "platform": short(about.get("platform", ""), 120),
        "Python": short(str(about.get("python", "")).partition(" ")[0]),
        "torch": short(packages.get("torch", "")) if isinstance(packages, dict) else "",
    }
    return {name: text for name, text in found.items() if text}


def _pair(value: object) -> tuple[str, str]:
    before, now = value if isinstance(value, list) and len(value) == 2 else ("", value)
    return short(before), short(now)


def _sequence(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _mappings(value: object) -> list[dict[str, Any]]:
    return [each for each in _sequence(value) if isinstance(each, dict)]

"""Fits the A100's constants to measured steps, and says how well a fit does on rows that it never saw.

``python -m benchmarks.planner`` prints the errors of the shipped description. ``--fit FILE`` fits it anew and writes
it; ``--picture FILE`` draws them; ``--cross`` fits once for each model and each machine size that is left out
(minutes). ``--executed`` leaves the tables aside, calibrates on this machine and compares with runs on it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.planner import executed, memory
from benchmarks.planner.fit import Weighted, fit_constants, fit_shapes
from benchmarks.planner.picture import picture
from benchmarks.planner.tables import measured, narayanan
from benchmarks.support.report import heading
from megatron_run.config.yaml import yaml_text
from megatron_run_planner.accuracy import Accuracy, Compared, Measured, compare, summarise
from megatron_run_planner.devices import Device, read_device
from megatron_run_planner.schedules import Schedules

#: Of the whole fit, how much each table weighs.
WEIGHTS = {"single": 1.0, "multi": 2.0, "narayanan": 0.5}
Tables = dict[str, list[Measured]]
Judged = dict[str, Accuracy]
Key = Callable[[Measured], object]


def fit(shipped: Device, tables: Tables) -> tuple[Device, Device]:
    """The constants that fit ``tables``, and the same with the shapes of the dense table."""
    weighted = [Weighted(rows, WEIGHTS[name]) for name, rows in tables.items() if rows]
    device = fit_constants(shipped, weighted)
    return device, fit_shapes(device, tables["single"])


def described(device: Device) -> str:
    """``device`` as a YAML file: constants of three digits, a line for each measured shape."""
    fields = device.model_dump(exclude={"layers"})
    for section in fields.values():
        if isinstance(section, dict):
            section |= {name: float(f"{value:.3g}") for name, value in section.items() if isinstance(value, float)}
    rows = [f"  - [{', '.join(map(str, layer))}]\n" for layer in device.layers]
    return "".join([yaml_text(fields), "# hidden, heads, sequence, tensor, micro batch, ratio\nlayers:\n", *rows])


def line(name: str, found: Accuracy) -> str:
    """One line of the report."""
    return (
        f"{name:42} rows {len(found.rows):4}  error {found.mean_error:6.2%}  tau {found.kendall:.3f}  "
        f"regret {found.regret_mean:.2%} on average, {found.regret_max:.2%} at most, of {len(found.regrets)} tasks"
    )


def cross(shipped: Device, tables: Tables, key: Key, schedules: Schedules) -> tuple[Judged, Judged]:
    """The measured tables predicted by fits that saw no row with the same ``key``: constants alone, and shapes too."""
    names = ("single", "multi")
    found: list[dict[str, list[Compared]]] = [{name: [] for name in names} for _ in range(2)]
    for left_out in sorted({key(row) for name in names for row in tables[name]}, key=str):
        rest = {name: [row for row in rows if key(row) != left_out] for name, rows in tables.items()}
        for device, judged in zip(fit(shipped, rest), found, strict=True):
            for name in names:
                unseen = [row for row in tables[name] if key(row) == left_out]
                judged[name] += compare(unseen, device, schedules).rows if unseen else ()
    alone, shapes = ({name: summarise(tuple(rows)) for name, rows in judged.items()} for judged in found)
    return alone, shapes


FOLDS: Iterable[tuple[str, Key]] = (
    ("model left out", lambda row: (row.model.hidden, len(row.model.layers))),
    ("machine size left out", lambda row: row.split.ranks),
    ("hidden size left out", lambda row: row.model.hidden),
)


def main() -> None:
    """Parse the command line and print the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every tenth row of the tables")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="fit, and write the description")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw predicted and measured steps as SVG")
    parser.add_argument("--cross", action="store_true", help="fit for each part that is left out")
    parser.add_argument("--executed", action="store_true", help="calibrate here, then run and predict configurations")
    parser.add_argument("--memory", action="store_true", help="bytes of whole steps here, beside a dry run's count")
    parser.add_argument("--only", default="", metavar="PATTERN", help="with --executed: runs whose names match")
    parser.add_argument("--device", type=Path, metavar="FILE", help="with --executed: a calibration made before")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="with --executed or --memory: write results there")
    chosen = parser.parse_args()
    if chosen.memory:
        words = (parser.prog, *sys.argv[1:])
        lines = [*heading("Planned against measured memory", words), *memory.report(quick=chosen.quick)]
        print("\n".join(lines))
        if chosen.write:
            (chosen.write / "planner_memory.md").write_text("\n".join(lines) + "\n", "utf-8")
        return
    if chosen.executed:
        words = (parser.prog, *sys.argv[1:])
        executed.main(words, quick=chosen.quick, only=chosen.only, device_file=chosen.device, output=chosen.write)
        return
    device, schedules = read_device("a100"), Schedules()
    tables: Tables = {"single": measured("single"), "multi": measured("multi"), "narayanan": narayanan()}
    if chosen.quick:
        tables = {name: rows[::10] for name, rows in tables.items()}
    of_tables(device, schedules, tables, chosen)


def of_tables(device: Device, schedules: Schedules, tables: Tables, chosen: argparse.Namespace) -> None:
    """Print the errors of every table, and do what else was ``chosen``."""
    if chosen.fit:
        device = fit(device, tables)[1]
        chosen.fit.write_text(described(device), encoding="utf-8")
    whole = {name: compare(rows, device, schedules) for name, rows in tables.items()}
    for name, found in whole.items():
        print(line(name, found))
    if chosen.picture:
        chosen.picture.write_text(picture(whole), encoding="utf-8")
    plain = device.model_copy(update={"layers": ()})
    for name, rows in tables.items():
        print(line(f"{name}, constants alone", compare(rows, plain, schedules)))
    if chosen.cross:
        for title, key in FOLDS:
            for alone, judged in zip((", constants alone", ""), cross(device, tables, key, schedules), strict=True):
                for name, found in judged.items():
                    print(line(f"{name}, {title}{alone}", found), flush=True)


if __name__ == "__main__":
    main()

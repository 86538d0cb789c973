"""Draws which microbatch holds which slot of a stage over one step."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_run_engine.capture.order import Pass, Slots


def slots_text(order: Sequence[Pass], slots: Slots, width: int = 100) -> str:
    """Draw one line per slot and one column per pass. A column shows the microbatch that holds the slot.

    A forward shows a digit, a backward a small letter, and ``-`` fills the time between them. Steps longer than
    ``width`` passes are cut.
    """
    steps = [each for each in order if each.kind != "end"]
    lines = [["."] * len(steps) for _ in range(slots.count)]
    started: dict[tuple[int, int], int] = {}
    for column, (kind, chunk, copy) in enumerate(steps):
        line = lines[slots.of[chunk, copy]]
        if kind == "F":
            started[chunk, copy] = column
            line[column] = str(copy % 10)
            continue
        first = started.pop((chunk, copy))
        line[first + 1 : column] = ["-"] * (column - first - 1)
        line[column] = chr(ord("a") + copy % 26)
    margin = len(str(max(0, slots.count - 1)))
    cut = "~" if len(steps) > width else "|"
    shown = [f"slot {slot:{margin}} |{''.join(line[:width])}{cut}" for slot, line in enumerate(lines)]
    return "\n".join([*shown, "digit: forward of that microbatch (its last digit); a, b, ...: its backward"])

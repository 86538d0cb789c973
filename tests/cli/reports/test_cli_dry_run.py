from __future__ import annotations

from megatron_run_cli.reports.dry_run import slots_text
from megatron_run_engine.capture import Pass, shared_slots


def test_the_picture_shows_who_holds_a_slot_and_until_when() -> None:
    order = [Pass("F", 0, 0), Pass("F", 0, 1), Pass("B", 0, 0), Pass("end", 0, 0), Pass("B", 0, 1), Pass("end", 0, 1)]
    first, second, legend = slots_text(order, shared_slots(order)).splitlines()
    assert (first, second) == ("slot 0 |0-a.|", "slot 1 |.1-b|")
    assert "digit" in legend

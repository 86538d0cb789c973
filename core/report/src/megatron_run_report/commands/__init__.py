"""``megatron-run report``.

The command line loads it; it imports the command line, and nothing else of this package does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from click import Command


@hookimpl
def megatron_run_commands() -> Mapping[str, Command]:
    """The command ``report``."""
    from megatron_run_report.commands.report import report

    return {"report": report}

"""``megatron-run sweep``, and what only it does.

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
    """The command ``sweep``."""
    from megatron_run_sweep.commands.sweep import sweep

    return {"sweep": sweep}

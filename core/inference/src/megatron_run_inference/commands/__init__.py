"""``megatron-run generate`` and ``eval``.

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
    """The command ``generate`` and the group ``eval``."""
    from megatron_run_inference.commands.evaluate import evaluate
    from megatron_run_inference.commands.generate import generate

    return {"generate": generate, "eval": evaluate}

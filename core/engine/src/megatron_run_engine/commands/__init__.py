"""Commands of ``megatron-run`` for what the engine owns: ``import``, ``export`` and ``data cache``.

The command line loads them; they import the command line, and nothing else of the engine does.

Imports: data, errors, formats, hookspecs, megatron_run_cli, registry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from click import Command


@hookimpl
def megatron_run_commands() -> Mapping[str, Command]:
    """Conversions of models, and a command of the group ``data``."""
    from megatron_run_engine.commands.conversion import export, import_
    from megatron_run_engine.commands.kept_tokens import cache

    return {"import": import_, "export": export, "data.cache": cache}

"""The files that a command reads to know what is asked of it, none of which it may replace."""

from __future__ import annotations

from pathlib import Path

from megatron_run.config.request import Request
from megatron_run.config.sources import configuration_files, read_sources
from megatron_run.errors import Findings
from megatron_run.registry.choose import is_file


def input_files(request: Request) -> tuple[Path, ...]:
    """The configurations of ``request`` that are files, and its plugins that are, wherever they were chosen.

    Raises :class:`~megatron_run.errors.Problems` when a configuration cannot be read.
    """
    chosen = read_sources(request, Findings(), []).choices.values()
    plugins = (
        Path(choice.reference).expanduser() for choices in chosen for choice in choices if is_file(choice.reference)
    )
    return (*configuration_files(request), *plugins)

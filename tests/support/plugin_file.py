"""Plugins in single files, written by tests."""

from __future__ import annotations

from pathlib import Path

_SCHEDULE = """
from pydantic import BaseModel, ConfigDict, Field

from megatron_run import Action, PluginInfo, hookimpl
from megatron_run.contracts import Schedule


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

{options}

class {name}(Schedule):
    def actions(self, spec):
{actions}

@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("schedule", "{file}", options=Options, provides=frozenset({{"parallel.pipeline"}}), {info})


@hookimpl
def megatron_run_create_schedule(options):
    return {name}()
"""

GPIPE = """
order = [Action("F", m, 0) for m in range(spec.microbatches)]
order += [Action("B", m, 0) for m in range(spec.microbatches)]
return [order] * spec.stages
"""


def schedule_file(path: Path, *, options: str = "", actions: str = GPIPE, info: str = "") -> str:
    """Write a schedule plugin to ``path``; lines of ``options``, the body of ``actions``. Returns the path's text."""
    text = _SCHEDULE.format(
        name=path.stem.title(),
        file=path.stem,
        options=_indented(options or "pass", 4),
        actions=_indented(actions, 8),
        info=info,
    )
    path.write_text(text, encoding="utf-8")
    return str(path)


def _indented(text: str, columns: int) -> str:
    return "".join(f"{' ' * columns}{line}\n" for line in text.strip().splitlines())

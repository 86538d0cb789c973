"""The work of the ranks of ``megatron-run generate``: each loads its part, all write, and the first one answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run_inference.loaded_model import LoadedModel
from megatron_run_inference.network import objects
from megatron_run_inference.source import find_source
from megatron_run_inference.writing import Writing

if TYPE_CHECKING:
    from megatron_run.contracts.activity import Activity
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.runtime.world import World
    from megatron_run_inference.source import Source


__all__ = ["objects", "open_source", "work"]


def work(run: ResolvedRun, world: World, activity: Activity, arguments: Mapping[str, Any]) -> None:
    """Write what ``arguments`` ask for: ``path``, ``step``, ``prompts``, and ``writing`` as keywords.

    The first rank prints pieces as they come if ``stream`` is set, and leaves the texts in the file ``result``.
    """
    model = LoadedModel(run, open_source(arguments), world, activity=activity)
    activity.enter("generate")
    prompts, first = arguments["prompts"], world.rank == 0
    page = model.start(prompts, Writing(**arguments["writing"]))
    show = arguments["stream"] and first
    if show:
        _show(prompts[0])
    for _, piece in page.pieces():
        if show:
            _show(piece)
    if first:
        answer = {"caches": model.network.caches, "texts": [asdict(text) for text in page.completions()]}
        Path(arguments["result"]).write_text(json.dumps(answer), encoding="utf-8")


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def open_source(arguments: Mapping[str, Any]) -> Source:
    """The model at ``path``, or its ``step``, of files that the launcher has verified."""
    path = arguments["path"]
    return find_source(None if path is None else Path(path), arguments["step"], verified=True)

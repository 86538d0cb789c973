"""The work of the ranks of ``megatron-run eval``, and where the numbers of a run are kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.config.request import Request
from megatron_run.planning import resolve
from megatron_run.registry.importing import no_files_run
from megatron_run_engine.run_folder.folder import last_config
from megatron_run_inference.generating import open_source
from megatron_run_inference.loaded_model import LoadedModel
from megatron_run_inference.network import objects

if TYPE_CHECKING:
    from megatron_run.contracts import EvalMetrics, Observer
    from megatron_run.contracts.activity import Activity
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.runtime.world import World
    from megatron_run_inference.source import Source

__all__ = ["objects", "record", "work"]


def work(run: ResolvedRun, world: World, activity: Activity, arguments: Mapping[str, Any]) -> None:
    """Evaluate the model at ``path`` on ``tasks``, or on those of the harness in ``names``.

    The other ``arguments`` are those of :meth:`LoadedModel.evaluate`, or of ``run_harness``. The first rank writes what
    was found to the file ``result``.
    """
    model = LoadedModel(run, open_source(arguments), world, activity=activity)
    activity.enter("evaluate")
    answer: object
    if "names" in arguments:
        from megatron_run_inference.harness import find_tasks, run_harness

        names = arguments["names"]
        how = {name: arguments[name] for name in ("shots", "batch", "chat")}
        answer = run_harness(model, find_tasks(names, arguments["folder"]), names, **how)
    else:
        results = model.evaluate(*arguments["tasks"], stride=arguments["stride"], batch=arguments["batch"])
        answer = [asdict(each) for each in results]
    if world.rank == 0:
        Path(arguments["result"]).write_text(json.dumps(answer, default=str), encoding="utf-8")


def record(source: Source, results: Iterable[EvalMetrics]) -> Path | None:
    """Give ``results`` to the observers of the run that ``source`` is a step of; its folder, or None if there is none.

    An observer that is a file hears nothing: the folder may be somebody else's, and may not name code.

    Raises what they raise, and :class:`~megatron_run.errors.RunError` if one of them is not installed.
    """
    folder = source.path.parent.parent
    config = last_config(folder)
    if not (folder / "run.json").is_file() or config is None:
        return None
    with no_files_run():
        run = resolve(Request((str(config.path),)), plan_only=True)
    known = (plugin for plugin in run.plugins["observer"] if plugin.entry is None or not plugin.entry.file)
    observers: list[Observer] = [plugin.create() for plugin in known]
    for metrics in results:
        for observer in observers:
            observer.on_later_eval(folder, metrics)
    return folder

"""The planner's best layout for the ranks that are there: ``run.elastic=plan``."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from megatron_run.errors.install_hint import check_installed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from megatron_run.config.request import Request

    #: Decides something for all ranks of a start, as one of them or whoever starts them: what the work returns.
    Decide = Callable[[Callable[[], Mapping[str, str]]], Mapping[str, str]]

#: Has ``best_layout``. A package above the engine, which knows it by name alone.
_PLANNER = "megatron_run_planner.task.fewer_ranks"


def at_once(work: Callable[[], Mapping[str, str]]) -> Mapping[str, str]:
    """Decide where nobody else does."""
    return work()


def with_planned_sizes(request: Request, decide: Decide = at_once) -> Request:
    """``request`` with the settings of the best layout for at most ``request.there`` ranks, where it asks for that.

    ``decide`` has it searched for once for all ranks: it takes seconds, and looks at the GPU.

    Raises :class:`megatron_run.errors.PluginError` without the planner, and what it raises where nothing fits.
    """
    from megatron_run.planning.resolver import run_setting

    if request.there is None or run_setting(request, "elastic") != "plan":
        return request
    on_gpus = run_setting(request, "device") != "cpu"
    return replace(request, planned=decide(lambda: _best_layout(replace(request, planned={}), on_gpus)))


def _best_layout(request: Request, on_gpus: bool) -> Mapping[str, str]:
    try:
        planner = import_module(_PLANNER)
    except ModuleNotFoundError as missing:
        check_installed(missing, "run.elastic=plan asks the planner")
        raise
    settings: Mapping[str, str] = planner.best_layout(request, request.there, _gpu() if on_gpus else "")
    return settings


def _gpu() -> str:
    """The name of this host's first GPU; empty where there is none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""

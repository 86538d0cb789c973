"""Launches the ranks of a run, or joins those that torchrun or Slurm started, and returns how the run ended.

Importing this package is instant, because the sidecar of each rank imports it: public names are loaded when first
used, torch by the ranks, or by ``launch`` when it resolves the run. Reading order: ``api`` (where ranks come from),
``rank`` (the job), ``local`` and ``fork_server`` (how it starts), ``worker`` (a rank's work), ``rank_output`` (where
its words go), ``failures`` (how its failure reaches the user), ``watchdog`` (how a hang is noticed).

Imports: checkpoint, config, contracts, errors, estimate, files, host, lazy, planning, registry, run_folder, runtime,
signal_bell, training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.lazy import typed_names

if TYPE_CHECKING:
    from megatron_run_engine.host.environments import LaunchMode as LaunchMode
    from megatron_run_engine.launch.api import FailedRunError as FailedRunError
    from megatron_run_engine.launch.api import launch as launch
    from megatron_run_engine.launch.api import run_task as run_task
    from megatron_run_engine.launch.api import train as train
    from megatron_run_engine.launch.options import LaunchOptions as LaunchOptions
    from megatron_run_engine.launch.rank import RankTask as RankTask
    from megatron_run_engine.launch.results import RunResult as RunResult

__getattr__, __dir__, __all__ = typed_names(__name__)

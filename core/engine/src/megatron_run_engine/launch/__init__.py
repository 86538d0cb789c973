"""Launches the ranks of a run, or joins the world that torchrun or Slurm made, and watches them.

Importing this package is instant: torch is imported by the ranks, and by ``launch`` when it resolves the run.

Imports: checkpoint, config, contracts, errors, planning, registry, run_folder, runtime, training.
"""

from __future__ import annotations

from megatron_run_engine.launch.job import Ending
from megatron_run_engine.launch.start import FailedRunError, Terms, launch, train
from megatron_run_engine.launch.worlds import How, find_world

__all__ = ["Ending", "FailedRunError", "How", "Terms", "find_world", "launch", "train"]

"""Launches the ranks of a run, or joins those that torchrun or Slurm started, and returns how the run ended.

A start, from the command to the last step. Of local ranks the launcher decides everything, once, and hands it over as
text, so that a rank imports and creates, and decides nothing anew::

    api.launch                          what the command and ``train`` call
      environments.find_world           the world of torchrun or Slurm; None: its ranks are started here
      resolver.resolve                  the only time: sources, plugins, options, plans (megatron_run.planning)
      attempts.checked                  its layers are made on the meta device, its initial weights found
      attempts.start_local              each time that the ranks are started
        opening.open_run_folder         the lock, the records
        run_text.hand_over              the resolved run as text (megatron_run.planning)
        job.Job.write                   it and all else that a rank is told
        local.run_local
          start.forked_ranks            ranks on CPUs: ``fork_server`` imports all, takes the run over, and forks them;
                                        it stays for the next attempt (``start.Servers``)
          start.spawned_ranks           or each has an interpreter of its own
          local._Ranks.wait             the watchdog (``watchdog``) looks for ranks that hang
          local._run_result             who failed first (``failures``)
        restarts.Restarts.next          whether all are started again, and with which ranks (``run.elastic``)

    rank.main                           a local rank
      job.Job.read
      run_text.take_over                as the launcher resolved it
      worker.RankWorker.run             the work, whoever started the rank
        rendezvous.agree_on_run
        rendezvous.Rendezvous.renumber  of torchrun or Slurm: ranks that the run folder excludes get the last numbers
        rendezvous.check_digests        all run the same code
        worker.train_in_folder
          preemption.preempted          looks for the end of the machine's time
          trainer.train_rank            builds and trains (``training``)
        rendezvous.Rendezvous.stand_by  instead, on a rank that ``run.elastic`` leaves
      job.RankResult.write              how it ended, for the launcher

A rank of torchrun or Slurm is its own launcher: :func:`api.launch` resolves and checks there, once a process, and goes
on with ``RankWorker.run``, which opens the run folder. It resolves once more only if another run has become
``runs/latest`` since rank 0 looked.

Importing this package is instant, because the sidecar of each rank imports it: public names are loaded when first
used, torch by the ranks, or by ``launch`` when it resolves the run.

Imports: checkpoint, config, contracts, drawing, errors, estimate, files, host, lazy, planning, registry, run_folder,
runtime, signal_bell, training.
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
    from megatron_run_engine.launch.job import LaunchOptions as LaunchOptions
    from megatron_run_engine.launch.job import RankTask as RankTask
    from megatron_run_engine.launch.job import RunResult as RunResult

__getattr__, __dir__, __all__ = typed_names(__name__)

"""Jobs of a conformance suite on several ranks: a set of ranks is started once per size, for all jobs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

from megatron_run.registry.discover import Entry
from megatron_run.registry.load import load
from megatron_run.registry.loaded_plugin import Plugin
from megatron_run_testing.check import CheckFailed
from megatron_run_testing.ranks import Progress, Work, run_on_ranks

Job = TypeVar("Job", bound=Hashable)


class SendablePlugin:
    """The plugin ``entry`` with ``options``; it can be sent to another process, which loads the plugin again."""

    def __init__(self, entry: Entry, options: Mapping[str, Any]) -> None:
        self.entry, self.options = entry, options

    def __reduce__(self) -> tuple[type[Self], tuple[Entry, Mapping[str, Any]]]:
        return type(self), (self.entry, self.options)  # a loaded plugin cannot be pickled

    @cached_property
    def plugin(self) -> Plugin:
        """The loaded plugin."""
        plugin = load(self.entry, "plugins check")
        return plugin.with_options(plugin.options_model.model_validate(self.options))


@dataclass
class Rehearsal(Generic[Job]):
    """Runs ``work(rank, world, *arguments, jobs)``, which yields one item per job, and keeps the results of all ranks.

    ``timeout`` is in seconds, for all jobs with one number of ranks. The first argument is the suite's subject;
    ``sendable`` names a class of subjects that can be sent to other processes.
    """

    work: Work
    arguments: tuple[Any, ...]
    jobs: Sequence[Job]
    timeout: float
    sendable: str
    #: By number of ranks and job: the ranks' items, or the failure of the job.
    _seen: dict[int, dict[Job, list[Any] | str]] = field(default_factory=dict)

    def found(self, world: int, job: Job, where: str) -> list[Any]:
        """The results of ``job`` on each of ``world`` ranks. Raises :class:`CheckFailed`, which states ``where``."""
        seen = self._seen.setdefault(world, {})
        if job not in seen:
            self._start(world, job)
        items = seen[job]
        if isinstance(items, str):
            raise CheckFailed(f"{where}: {items}")
        return items

    def _start(self, world: int, first: Job) -> None:
        """Run ``first`` and all later jobs on a new set of ranks, until one fails."""
        jobs = self.jobs[self.jobs.index(first) :]
        progress = self._run(world, jobs)
        for index, job in enumerate(jobs[: progress.common]):
            self._seen[world][job] = [items[index] for items in progress.yielded]
        if progress.common < len(jobs):
            self._seen[world][jobs[progress.common]] = progress.failure

    def _run(self, world: int, jobs: Sequence[Job]) -> Progress:
        try:
            return run_on_ranks(self.work, world, *self.arguments, jobs, timeout=self.timeout)
        except (AttributeError, TypeError) as cause:  # raised by multiprocessing for a function that is not importable
            raise CheckFailed(
                f"{self.arguments[0]!r} cannot be sent to another rank ({cause}): "
                f"give a module's function, or {self.sendable}"
            ) from cause

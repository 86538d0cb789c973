"""Guards: skip, rewind or stop when losses, weights or ranks go wrong.

Every decision is made from numbers that are equal on all ranks, so that all of them skip, rewind and stop together. A
rank that decided alone would leave the others waiting in a collective.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from megatron_run.contracts import scale_text
from megatron_run.errors import GuardError, RankLostError, RunError
from megatron_run_engine.checkpoint.collectives import WorldRanks
from megatron_run_engine.runtime.losses import LANGUAGE_MODEL
from megatron_run_engine.training.health.exclusion import Exclusion, left_out
from megatron_run_engine.training.health.replay import Replay
from megatron_run_engine.training.health.replicas import Difference, compare_replicas, content_hash
from megatron_run_engine.training.health.stragglers import Stragglers
from megatron_run_engine.training.health.suspects import HARDWARE, likely_cause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from megatron_run.contracts import Microbatch
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.checkpoint.collectives import Ranks
    from megatron_run_engine.run_folder import RunFolder
    from megatron_run_engine.runtime.losses import Losses, Reported
    from megatron_run_engine.runtime.world import World
    from megatron_run_engine.training.build import Assembly
    from megatron_run_engine.training.health.replay import Verdict
    from megatron_run_engine.training.numbers import HostNumbers, Progress
    from megatron_run_engine.training.state.checkpointing import Checkpointing


#: Standard deviation of a normal distribution in median absolute deviations (Rousseeuw and Croux 1993).
_NORMAL = 1.4826
#: The deviation is at least this share of the median: in a window of nearly equal losses any change looks extreme.
_LEAST = 0.01


def spike_limit(losses: Sequence[float], factor: float) -> float:
    """Return the loss above which the next loss is a spike: ``factor`` deviations above the median of ``losses``.

    The deviation is the median absolute deviation, scaled to the standard deviation of normal noise. Median and
    deviation are robust: up to half of ``losses`` may be spikes themselves.
    """
    middle = median(losses)
    deviation = _NORMAL * median(abs(loss - middle) for loss in losses)
    return middle + factor * max(deviation, _LEAST * abs(middle))


class NotFinite(NamedTuple):
    """The values that are not finite, in words. Each field is empty if all is finite.

    ``loss``: the loss, with the first microbatch and rank that saw it. ``weights``: a parameter, with the lowest rank
    that holds it.
    """

    loss: str
    weights: str


def find_not_finite(assembly: Assembly, reported: Iterable[Reported], ranks: Ranks) -> NotFinite:
    """Check the losses that each rank ``reported`` in this step, and its weights. Collective; all get one answer."""
    notes = [json.loads(note) for note in ranks.gather(json.dumps(_note(assembly, reported)))]
    return NotFinite(*json.loads(ranks.broadcast(json.dumps(_merged(notes)))))


def _note(assembly: Assembly, reported: Iterable[Reported]) -> dict[str, Any]:
    seen = ((each, each.total.item()) for each in reported if not each.total.isfinite())
    losses = [(each.microbatch, each.name, str(value)) for each, value in seen]
    return {
        "stage": assembly.context.topology.stage,
        "loss": min(losses, default=None),
        "weights": next(iter([*_not_finite_weights(assembly)]), None),  # all: values may have to be gathered
    }


def _not_finite_weights(assembly: Assembly) -> Iterator[str]:
    """Yield the parameters that are not finite, each with such a value."""
    for parameter, info in assembly.values():
        finite = torch.isfinite(parameter.detach())
        if not finite.all():
            yield f"{info.name} holds {parameter.detach()[~finite][0].item()}"


def _merged(notes: Sequence[dict[str, Any]]) -> NotFinite:
    """Choose the first microbatch that was not finite, on the lowest rank that saw it."""
    losses = [(note["loss"], rank) for rank, note in enumerate(notes) if note["loss"]]
    weights = [f"{note['weights']} on rank {rank}" for rank, note in enumerate(notes) if note["weights"]]
    loss = ""
    if losses:
        (microbatch, name, value), rank = min(losses, key=lambda each: (each[0][0], each[1]))
        loss = f"the loss {name} is {value}, first seen by rank {rank} (stage {notes[rank]['stage']})"
        loss += f" in microbatch {microbatch}"
    return NotFinite(loss, weights[0] if weights else "")


_GRADIENT = "a gradient was not finite"
_CALMER = "lower train.lr, lengthen train.lr_warmup, check the data"
#: What is said to differ where tensor-parallel ranks were fed different samples.
_SAMPLES = "batch of samples"
#: Reports in a row that name a rank before it is left out: one may be chance, as a page cache that is cold, and by the
#: third, at least two intervals later, whatever else the machine did has mostly ended.
_SLOW_REPORTS = 3


class Guards:
    """The guards of a run of ``last`` steps, on one of its ranks. ``losses`` collects this rank's losses.

    ``folder`` gets the ranks that are to be left out, and ``world`` says where this one is.
    """

    def __init__(
        self, run: ResolvedRun, assembly: Assembly, losses: Losses, last: int, folder: RunFolder, world: World
    ) -> None:
        self._config, self._max_skips = run.config.guard, run.config.train.max_skips
        self._assembly, self._losses, self._plugins = assembly, losses, run.plugins
        context, batch = assembly.context, run.config.train.global_batch_size
        topology = context.topology
        self._ranks = WorldRanks(context.groups, topology.rank, topology.sizes.world, context.device)
        self._replica_interval = self._config.replica_interval.steps(last, batch) if topology.sizes.world > 1 else 0
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._exclusion = Exclusion(run, folder, world, self._ranks)
        again = self._replica_interval and self._deterministic and run.config.checkpoint.memory_interval.amount
        self._replay = Replay(assembly, self._ranks) if again else None
        self._were_equal = False  # whether a comparison has found all replicas equal
        self._data: list[Tensor] = []  # hashes of what this rank was fed in the step
        interval = self._config.straggler_interval.steps(last, batch)
        self._stragglers = Stragglers(context, interval, self._config.straggler_factor)
        if interval:
            context.groups.activity.timers.append(self._stragglers.enter)
        self._reason = ""  # why the last step was skipped
        self._spike = ""  # the spike to rewind for

    def watched(self, step: int, load: Callable[[int], Microbatch]) -> Callable[[int], Microbatch]:
        """``load``, with what it loads hashed in a step after which replicas are compared.

        Tensor-parallel ranks whose samples differ raise no error: they learn noise.
        """
        self._data.clear()
        split = self._assembly.context.topology.sizes.tensor > 1
        if not (split and self._replica_interval and step % self._replica_interval == 0):
            return load

        def microbatch(index: int) -> Microbatch:
            loaded = load(index)
            self._data += [content_hash(field) * (2 * index + 1) for field in loaded.fields.values()]
            return loaded

        return microbatch

    def skips(self, progress: Progress, numbers: HostNumbers) -> bool:
        """Decide by its ``numbers`` whether to skip the update of the step after ``progress``.

        If not, its loss joins the window.
        """
        if self._replay is not None:
            self._replay.note(progress.step + 1)
        self._reason = self._reason_to_skip(progress, numbers.means, overflow=numbers.overflow)
        return bool(self._reason)

    def rewind(self, progress: Progress, checkpoints: Checkpointing) -> Progress | None:
        """Rewind to the newest checkpoint if the loss spiked and ``guard.spike`` is ``rewind``. Collective.

        The samples seen since that checkpoint are not repeated. Returns the progress at the checkpoint, or None if the
        run is not rewound.
        """
        spike, self._spike = self._spike, ""
        if not spike:
            return None
        if progress.rewinds >= self._config.max_rewinds:
            fix = f"{_CALMER}, or raise guard.max_rewinds"
            self._stop(GuardError(f"the loss spiked again after {progress.rewinds} rewinds", why=spike, fix=fix))
        back = checkpoints.reload_newest()
        if back is None:
            self._warn(f"step {progress.step} is skipped: nothing is saved yet that the run could go back to")
            return None
        dropped = progress.position - back.samples
        self._warn(f"back to step {back.step}, past the samples {back.position} to {progress.position - 1}")
        return replace(back, dropped=dropped, rewinds=progress.rewinds + 1)

    def check(self, progress: Progress, *, saving: bool, checkpoints: Checkpointing | None = None) -> Progress | None:
        """Check skips, replicas and stragglers after a step. ``saving``: also compare replicas now. Collective.

        Returns the progress at the last of the ``checkpoints`` where the steps since then are to be done again, else
        None. Raises :class:`GuardError` on every rank, or :class:`RankLostError` for one that the next start leaves
        out.
        """
        if progress.skipped_in_a_row >= self._max_skips:
            self._stop_skipping(progress)
        if self._replica_interval and (saving or progress.step % self._replica_interval == 0):
            back = self._compare_replicas(progress, checkpoints)
            if back is not None:
                return back
            if saving and self._replay is not None:
                self._replay.saving()
        self._warn_of_straggler(progress.step)
        return None

    def _reason_to_skip(self, progress: Progress, means: Mapping[str, float], *, overflow: bool) -> str:
        if not all(isfinite(means.get(name, 0.0)) for name in self._losses.names):
            return self._loss_not_finite(progress.step + 1)
        if overflow:
            return _GRADIENT
        loss = means.get(LANGUAGE_MODEL)
        if loss is None:
            return ""
        if reason := self._spiked(progress, loss):
            return reason
        progress.losses = (*progress.losses, loss)[-self._config.spike_window :]
        return ""

    def _loss_not_finite(self, step: int) -> str:
        found = find_not_finite(self._assembly, self._losses.reported, self._ranks)
        if self._config.nan_loss == "stop":
            fix = _fix(found.weights, f"{_CALMER}, or skip such steps: guard.nan_loss=skip")
            self._stop(GuardError(f"step {step}: {found.loss}", why=found.weights or "all weights are finite", fix=fix))
        self._warn(f"step {step} is skipped: {found.loss}; {found.weights or 'all weights are finite'}")
        return found.loss

    def _spiked(self, progress: Progress, loss: float) -> str:
        """Return why to skip the update if ``loss`` is a spike, else an empty text."""
        window, factor = progress.losses, self._config.spike_factor
        if len(window) < self._config.spike_window or loss <= (limit := spike_limit(window, factor)):
            return ""
        spike = f"the loss of step {progress.step + 1} is {loss:.4g}, a spike above {limit:.4g}"
        if self._config.spike == "continue":
            self._warn(f"{spike}; training continues")
            return ""
        if self._config.spike == "rewind":
            self._spike = spike
        self._warn(f"{spike}; its update is skipped")
        return spike

    def _stop_skipping(self, progress: Progress) -> NoReturn:
        weights = find_not_finite(self._assembly, (), self._ranks).weights
        scale = self._assembly.scaler.scale.item()
        at = f", with a loss scale of {scale_text(scale)}" if self._reason == _GRADIENT and scale != 1 else ""
        why = f"last at step {progress.step}: {self._reason}{at}" + (f"; {weights}" if weights else "")
        fix = _fix(weights, f"{_CALMER}, or raise train.max_skips")
        self._stop(GuardError(f"{progress.skipped_in_a_row} steps in a row were skipped", why=why, fix=fix))

    def _compare_replicas(self, progress: Progress, checkpoints: Checkpointing | None) -> Progress | None:
        step, fed = progress.step, {}
        if self._data:
            at = self._assembly.context.topology
            fed[f"{_SAMPLES}#{at.data_rank}.{at.context_rank}#{at.stage}"] = torch.stack(self._data).sum()
        found = compare_replicas(self._assembly, self._ranks, deterministic=self._deterministic, more=fed)
        if found is not None and found.tensor == _SAMPLES:
            why = "tensor-parallel ranks share their samples: the data, or what reads them, differ between these ranks"
            fix = "give all hosts the same data, from a plugin that depends on nothing but its arguments"
            self._stop(GuardError(f"at step {step} {found}", why=why, fix=fix))
        if self._replay is not None:
            self._replay.note(step, made=True)
            if (verdict := self._replay.verdict(progress, found)) is not None:
                self._stop_differing(verdict.step, verdict.found, verdict)
            back = self._replay.begin(progress, found, checkpoints) if found and checkpoints else None
            if back is not None:
                self._warn(
                    f"after step {step} {found}; the steps since {back.step} are done again, to see by whose fault"
                )
                return back
        if found is not None:
            self._stop_differing(step, found)
        self._were_equal = True
        return None

    def _stop_differing(self, step: int, found: Difference, verdict: Verdict | None = None) -> NoReturn:
        """Stop because of what was ``found`` after ``step``, and of the ``verdict`` on that, if there is one."""
        what, repeats = f"after step {step} {found}", verdict is not None and verdict.repeats
        cause = likely_cause(self._plugins, found.more + 1, first=not self._were_equal, repeats=repeats)
        faulty = verdict.faulty if verdict is not None else () if cause.accuses else found.minority
        why, fix = (cause.why if verdict is None else f"{verdict}: {cause.why}"), cause.fix
        if verdict is not None and faulty:
            why = f"{verdict}: {HARDWARE}"
            fix = f"leave {self._exclusion.named(faulty)} out, or set guard.exclude=differing and run.elastic=data"
        if verdict is None and not (found.agree or cause.accuses) and self._deterministic:
            fix = f"{fix}; with checkpoint.memory_interval a run finds out which rank it is"
        if faulty and self._exclusion.asked("differing"):
            failure = self._exclusion.record(faulty, step, f"differing: {what}: {why}")
            if not failure:
                self._stop(RankLostError(what, why=why, fix=left_out(faulty), rank=faulty[0]))
            fix = f"{fix}; {failure}"
        self._stop(GuardError(what, why=why, fix=fix))

    def _warn_of_straggler(self, step: int) -> None:
        found = self._stragglers.report(step)
        if found is None:
            return
        times = f"{found.seconds * 1e3:.3g} ms a step, the others that do the same {found.typical * 1e3:.3g} ms"
        line = f"rank {found.rank} holds the others up in {found.section}: it takes {times}"
        if self._exclusion.asked("slow") and self._stragglers.in_a_row == _SLOW_REPORTS:
            line += f"; {self._exclusion.record((found.rank,), step, f'slow: {line}') or left_out((found.rank,))}"
        self._warn(line)

    def _stop(self, error: RunError) -> NoReturn:
        # No collective may be in flight when the process groups are destroyed.
        self._assembly.optimizer.finish_param_sync()
        raise error

    def _warn(self, text: str) -> None:
        if self._ranks.rank == 0:
            self._assembly.context.log.warning("%s", text)


def _fix(weights: str, otherwise: str) -> str:
    """Advise an earlier checkpoint if the weights are not finite: no later step recovers from that."""
    return "resume from an earlier saved step: --resume STEP" if weights else otherwise

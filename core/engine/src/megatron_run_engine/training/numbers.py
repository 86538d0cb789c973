"""The numbers of a step: on the device while it runs, then on the host after one copy, then as observers see them."""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_run.contracts import StepMetrics
from megatron_run.errors import CheckpointError, ExitCode
from megatron_run_engine.runtime.losses import LANGUAGE_MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatron_run.contracts import DevicePeak
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.runtime.metrics import Metrics

#: The name under which observers see the zeros in the gradient (``train.count_zeros``).
ZEROS = "optimizer/zeros"
#: The metric by which a rank that was asked to stop reports its exit code. Observers do not see it.
STOP = "stop"
#: The metric by which a rank that was asked to stop reports that a save would not end in time. Observers do not see it.
UNSAVED = "unsaved"
#: The metric by which a rank reports that its captured graphs did not fit. Observers do not see it.
MISMATCH = "mismatch"


class StepNumbers(NamedTuple):
    """The numbers of a step on the device.

    ``sums`` [names, 2] holds (sum, weight) of each metric. ``found_inf`` (above 0 if a gradient is not finite),
    ``grad_norm``, ``zeros`` in the gradient (NaN if not counted) and ``loss_scale`` are [1].
    """

    sums: Tensor
    found_inf: Tensor
    grad_norm: Tensor
    zeros: Tensor
    loss_scale: Tensor

    def to_host(self, metrics: Metrics) -> HostNumbers:
        """Copy all numbers to the host at once. This is where the host waits for the device, once in a step."""
        # One concatenation and one tolist(): each separate copy would wait for the device again.
        *flat, found_inf, norm, zeros, scale = torch.cat([number.flatten().double() for number in self]).tolist()
        sums = [flat[index : index + 2] for index in range(0, len(flat), 2)]
        return HostNumbers(metrics.means(sums), found_inf > 0, _known(norm), _known(zeros), scale)


@dataclass(frozen=True)
class HostNumbers:
    """The numbers of a step on the host. ``means`` maps metric names to means; unreported metrics are absent.

    ``overflow``: a gradient is not finite. ``skipped``: the guards decided that the step changes no weight.
    """

    means: dict[str, float]
    overflow: bool
    grad_norm: float | None
    zeros: float | None
    loss_scale: float
    skipped: bool = False

    def without_update(self) -> HostNumbers:
        """The numbers of a step that is skipped: its gradients are of no use, and nothing is known of them."""
        return replace(self, grad_norm=None, zeros=None, skipped=True)


@dataclass
class Progress:
    """How far a run has come. ``scheduled`` counts the samples that advanced the learning rate; skipped steps do not.

    ``rewinds`` counts how often the run was rewound to a checkpoint, and ``dropped`` the samples that it passed over by
    that. ``losses`` are the losses of the last steps that were not skipped, oldest first; spikes are judged by them.
    """

    step: int = 0
    samples: int = 0
    scheduled: int = 0
    skipped_total: int = 0
    skipped_in_a_row: int = 0
    rewinds: int = 0
    dropped: int = 0
    losses: tuple[float, ...] = ()

    @classmethod
    def restored(cls, step: int, counters: Mapping[str, int], losses: Sequence[float]) -> Progress:
        """The progress that was saved with ``step``. Raises :class:`CheckpointError` for counters of no such step."""
        unknown = sorted(counters.keys() - cls().counters.keys())
        why = f"it counts {unknown[0]!r}, which this version does not know" if unknown else ""
        if counters.get("step") != step:
            why = why or f"it is step {step}, and its counter says {counters.get('step')}"
        if why:
            raise CheckpointError(f"step {step} cannot be resumed", why=why)
        return cls(**counters, losses=tuple(losses))

    @property
    def counters(self) -> dict[str, int]:
        """All counters by name, without the losses."""
        return {name: number for name, number in vars(self).items() if name != "losses"}

    @property
    def position(self) -> int:
        """The index in the sample stream at which the next step begins."""
        return self.samples + self.dropped

    def count(self, batch: int, *, skipped: bool) -> None:
        """Count one more step of ``batch`` samples."""
        self.step += 1
        self.samples += batch
        self.scheduled += 0 if skipped else batch
        self.skipped_total += int(skipped)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0


class StepDone(NamedTuple):
    """A finished step: its metrics, the times of its actions if traced, and the exit code if the run is to stop.

    ``mismatch`` tells whether captured graphs did not fit the step on any rank, ``unsaved`` whether no time is left for
    a save on any.
    """

    metrics: StepMetrics
    times: list[tuple[float, float]]
    stop: ExitCode | None
    mismatch: bool
    unsaved: bool = False


@dataclass(frozen=True)
class StepFacts:
    """A step as the host knows it without the device: batch in samples, microbatches, learning rate, seconds.

    ``flops`` are those of a token, forward and backward. ``peak`` is the peak of the device, None if unknown.
    """

    batch: int
    microbatches: int
    lr: float
    seconds: float
    flops: float
    peak: DevicePeak | None = None


def step_metrics(
    run: ResolvedRun, progress: Progress, facts: StepFacts, numbers: HostNumbers, device: torch.device
) -> StepMetrics:
    """Return the metrics of the step that ``progress`` counted last, as observers see them."""
    length = run.config.train.sequence_length
    rate = facts.batch * length / facts.seconds
    tflops = rate * facts.flops / run.sizes.world / 1e12
    return StepMetrics(
        step=progress.step,
        time=time.time(),
        samples=progress.samples,
        tokens=progress.samples * length,
        loss=numbers.means.get(LANGUAGE_MODEL),
        grad_norm=numbers.grad_norm,
        lr=facts.lr,
        loss_scale=numbers.loss_scale,
        skipped=numbers.skipped,
        skipped_total=progress.skipped_total,
        microbatches=facts.microbatches,
        step_time_s=facts.seconds,
        tokens_per_s=rate,
        tflops_per_device=tflops,
        mfu=None if facts.peak is None else tflops / facts.peak.tflops,
        memory_peak_gib=_peak_memory_gib(device),
        extra=_extra(numbers),
    )


def agreed_code(means: Mapping[str, float]) -> ExitCode | None:
    """Return the exit code to stop with: the one that ranks requested, SIGTERM's if they differ, None if none did."""
    # Only the requesting ranks report STOP, so the mean of equal codes is that code.
    mean = means.get(STOP)
    return None if mean is None else ExitCode(int(mean)) if mean in set(ExitCode) else ExitCode.SIGTERM


def _extra(numbers: HostNumbers) -> dict[str, float]:
    hidden = (LANGUAGE_MODEL, STOP, UNSAVED, MISMATCH)
    reported = {name: mean for name, mean in numbers.means.items() if name not in hidden}
    return reported if numbers.zeros is None else {**reported, ZEROS: numbers.zeros}


def _known(number: float) -> float | None:
    """Return None for NaN, which stands on the device for a number that is not known."""
    return None if math.isnan(number) else number


def _peak_memory_gib(device: torch.device) -> float:
    """This process's peak memory in GiB: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes on macOS, KiB on Linux

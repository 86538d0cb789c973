"""The numbers of a step: on the device while it runs, on the host by one copy, then as observers see them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_run.contracts import StepMetrics
from megatron_run.errors import ExitCode
from megatron_run_engine.training.device import peak_memory_gib

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_run.contracts import DevicePeak, Model
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.runtime.metrics import Metrics


#: The name under which observers see the zeros in the gradient (``train.count_zeros``).
ZEROS = "optimizer/zeros"
#: The metric by which ranks that want to stop say with which exit code; observers do not see it.
STOP = "stop"
#: The metric by which ranks say that their graphs did not fit; observers do not see it.
MISMATCH = "mismatch"


class StepNumbers(NamedTuple):
    """While they are on the device.

    ``sums`` [names, 2] are the metrics' (sum, weight); ``grad_norm`` (NaN when skipped), ``zeros`` in the gradient (NaN
    when not counted) and ``loss_scale`` are [1]. That the update was ``skipped`` the host has known for long.
    """

    sums: Tensor
    grad_norm: Tensor
    zeros: Tensor
    loss_scale: Tensor
    skipped: bool

    def to_host(self, metrics: Metrics) -> HostNumbers:
        """Copy everything to the host at once."""
        *flat, norm, zeros, scale = torch.cat([number.flatten().double() for number in self[:-1]]).tolist()
        sums = [flat[index : index + 2] for index in range(0, len(flat), 2)]
        return HostNumbers(metrics.means(sums), _known(norm), _known(zeros), scale, self.skipped)


@dataclass(frozen=True)
class HostNumbers:
    """The same on the host; ``means`` by the names of the meters, those that nobody reported left out."""

    means: dict[str, float]
    grad_norm: float | None
    zeros: float | None
    loss_scale: float
    skipped: bool


@dataclass
class Progress:
    """What a run has done so far. ``scheduled`` samples moved the learning rate: those of skipped steps did not.

    It went back ``rewinds`` times, and so passed over ``dropped`` samples of the stream. ``losses`` are those of the
    last steps that were not skipped, the oldest first: a loss is a spike by comparison with them.
    """

    step: int = 0
    samples: int = 0
    scheduled: int = 0
    skipped_total: int = 0
    skipped_in_a_row: int = 0
    rewinds: int = 0
    dropped: int = 0
    losses: tuple[float, ...] = ()

    @property
    def counters(self) -> dict[str, int]:
        """All of it but the losses, by name."""
        return {name: number for name, number in vars(self).items() if name != "losses"}

    @property
    def position(self) -> int:
        """Where the next step begins in the stream of samples."""
        return self.samples + self.dropped

    def count(self, batch: int, *, skipped: bool) -> None:
        """One more step of ``batch`` samples is done."""
        self.step += 1
        self.samples += batch
        self.scheduled += 0 if skipped else batch
        self.skipped_total += int(skipped)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0


class StepDone(NamedTuple):
    """A step that was done: its metrics, the times of its actions if they were taken, and the code to stop with.

    ``mismatch`` says whether graphs did not fit it, on any rank.
    """

    metrics: StepMetrics
    times: list[tuple[float, float]]
    stop: ExitCode | None
    mismatch: bool


@dataclass(frozen=True)
class StepFacts:
    """What the host knows of a step by itself: its batch in samples, microbatches, learning rate and seconds.

    ``peak`` is that of the device, None where it is not known.
    """

    batch: int
    microbatches: int
    lr: float
    seconds: float
    peak: DevicePeak | None = None


def step_metrics(
    run: ResolvedRun, model: Model, progress: Progress, facts: StepFacts, numbers: HostNumbers, device: torch.device
) -> StepMetrics:
    """The numbers of the step that ``progress`` counted last, as observers see them."""
    length = run.config.train.sequence_length
    rate = facts.batch * length / facts.seconds
    tflops = rate * model.flops_per_token(length) / run.sizes.world / 1e12
    return StepMetrics(
        step=progress.step,
        time=time.time(),
        samples=progress.samples,
        tokens=progress.samples * length,
        loss=numbers.means.get("lm"),
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
        memory_peak_gib=peak_memory_gib(device),
        extra=_extra(numbers),
    )


def agreed_code(means: Mapping[str, float]) -> ExitCode | None:
    """The code to stop with: that of the ranks that ask, as for SIGTERM where they differ, None where nobody asks."""
    mean = means.get(STOP)
    return None if mean is None else ExitCode(int(mean)) if mean in set(ExitCode) else ExitCode.SIGTERM


def _extra(numbers: HostNumbers) -> dict[str, float]:
    reported = {name: mean for name, mean in numbers.means.items() if name not in ("lm", STOP, MISMATCH)}
    return reported if numbers.zeros is None else {**reported, ZEROS: numbers.zeros}


def _known(number: float) -> float | None:
    """What the device has no number for is NaN there."""
    return None if math.isnan(number) else number

"""When a loss is a spike: far above the median of the losses before it."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The standard deviation of a normal distribution in median absolute deviations (Rousseeuw and Croux 1993).
_NORMAL = 1.4826
#: The least deviation that is expected, as a share of the median: a loss that hardly moves is no reason for alarm.
_LEAST = 0.01


def spike_limit(losses: Sequence[float], factor: float) -> float:
    """The loss above which one that follows ``losses`` is a spike: ``factor`` deviations above their median.

    The deviation is the median absolute one, scaled to equal the standard deviation of normal noise. Both are robust:
    up to half of ``losses`` may be spikes themselves.
    """
    middle = median(losses)
    deviation = _NORMAL * median(abs(loss - middle) for loss in losses)
    return middle + factor * max(deviation, _LEAST * abs(middle))

"""Injected faults: which rank fails, when, where and how.

``MEGATRON_RUN_FAULT="rank=2,step=3,at=backward,kind=kill"``; several are separated by ``;``. Without the variable
nothing is installed. :mod:`megatron_run_engine.training.health.faulting` carries them out. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, get_args

from megatron_run.contracts.activity import PhaseName
from megatron_run.errors import InputError
from megatron_run.errors.wording import advice, did_you_mean

#: The variable.
VARIABLE = "MEGATRON_RUN_FAULT"
#: What may happen, in words.
FAULTS: Mapping[str, str] = MappingProxyType(
    {
        "kill": "SIGKILL",
        "term": "SIGTERM, to this rank alone",
        "stop": "SIGSTOP: the process is there and does nothing",
        "exit": "the process ends with exit code 9 and says nothing",
        "hang": "the phase never ends",
        "slow": "the phase takes `seconds` longer, each time",
        "nan": "every gradient of this rank is NaN",
        "inf": "every gradient of this rank is infinite",
        "flip": "one bit of this rank's weights changes",
        "oom": "there is no memory left",
        "enospc": "the disk is full; in phases that save",
    }
)
#: Those that a signal brings about: they can come in the midst of a phase.
SIGNALLED = frozenset({"kill", "term", "stop"})


@dataclass(frozen=True)
class Fault:
    """An injected fault. It strikes when the phase ``at`` is entered for the ``nth`` time in a step.

    ``rank``, ``steps`` and ``attempt`` limit where it strikes; None means all. ``after`` delays a signal by so many
    seconds. ``seconds`` is the extra length of a slow phase.
    """

    at: str
    kind: str
    rank: int | None = None
    steps: range | None = None
    attempt: int | None = None
    nth: int = 1
    after: float = 0.0
    seconds: float = 1.0

    def strikes(self, step: int, phase: str, entered: int) -> bool:
        """Whether it happens as ``phase`` is entered for the time ``entered`` in ``step``; slowness is each time."""
        in_time = self.steps is None or step in self.steps
        return in_time and phase == self.at and (entered == self.nth or self.kind == "slow")


def read_faults(environment: Mapping[str, str], world: int | None = None) -> tuple[Fault, ...]:
    """The faults that ``environment`` asks for. Raises :class:`InputError`, also for a rank beyond ``world``."""
    parts = [part.strip() for part in environment.get(VARIABLE, "").split(";")]
    faults = tuple(_read(part) for part in parts if part)
    for fault in faults:
        if world is not None and fault.rank is not None and fault.rank >= world:
            raise _mistake(f"rank={fault.rank} is not among {world} rank{'s' if world > 1 else ''}")
    return faults


def _read(text: str) -> Fault:
    """One fault: ``rank=2,step=3,at=backward,kind=kill``."""
    asked: dict[str, Any] = {}
    for pair in text.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value:
            raise _mistake(f"{pair!r} is no KEY=VALUE")
        if key not in _READERS:
            raise _mistake(f"unknown key {key!r}", advice(did_you_mean(key, _READERS), f"known: {', '.join(_READERS)}"))
        if _field(key) in asked:
            raise _mistake(f"{key} is given twice")
        asked[_field(key)] = _READERS[key](value)
    missing = [name for name in ("at", "kind") if name not in asked]
    if missing:
        raise _mistake(f"{text!r} does not say {' and '.join(missing)}")
    fault = Fault(**asked)
    if fault.kind == "enospc" and not fault.at.startswith("save-"):
        raise _mistake(f"kind=enospc at={fault.at}", "only phases that save write to the disk: at=save-shard")
    if fault.after and fault.kind not in SIGNALLED:
        raise _mistake(f"after= with kind={fault.kind}", f"it goes with kind={', '.join(sorted(SIGNALLED))}")
    return fault


def _field(key: str) -> str:
    return "steps" if key == "step" else key


def _whole(value: str) -> int:
    if not value.isdecimal():
        raise _mistake(f"{value!r} is no whole number")
    return int(value)


def _ordinal(value: str) -> int:
    number = _whole(value)
    if number < 1:
        raise _mistake(f"{value!r} is not a count from 1")
    return number


def _steps(value: str) -> range:
    """``3`` or ``3-9``."""
    first, dash, last = value.partition("-")
    steps = range(_whole(first), _whole(last if dash else first) + 1)
    if not steps:
        raise _mistake(f"step={value} ends before it begins")
    return steps


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise _mistake(f"{value!r} is no number of seconds")
    return seconds


def _one_of(key: str, known: tuple[str, ...]) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value not in known:
            raise _mistake(f"unknown {key} {value!r}", advice(did_you_mean(value, known), f"known: {', '.join(known)}"))
        return value

    return read


_READERS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "rank": _whole,
        "step": _steps,
        "at": _one_of("phase", get_args(PhaseName)),
        "kind": _one_of("kind", tuple(FAULTS)),
        "attempt": _ordinal,
        "nth": _ordinal,
        "after": _seconds,
        "seconds": _seconds,
    }
)
assert {_field(key) for key in _READERS} == {field.name for field in fields(Fault)}


def _mistake(what: str, fix: str = "") -> InputError:
    return InputError(what, origin=f"environment {VARIABLE}", fix=fix)

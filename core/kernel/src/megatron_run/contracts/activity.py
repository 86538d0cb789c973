"""The current activity of a rank, for the watchdog, timers and injected faults. No torch.

The trainer and everything below it report each change of phase. Without listeners a report costs a few attribute
assignments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Literal, NamedTuple

#: The phases of a rank: ``start`` until the first step begins, ``end`` after the last.
PhaseName = Literal[
    "start", "data", "forward", "backward", "recompute", "send", "receive", "collective", "gradient-reduce",
    "optimizer", "parameter-gather", "observe", "evaluate", "generate", "capture", "load", "save", "save-shard",
    "save-manifest", "save-rename", "save-latest", "save-retention", "save-flush", "save-memory", "save-neighbour",
    "save-memory-commit", "end",
]  # fmt: skip
#: The scope of collectives between the background threads of all ranks.
BACKGROUND = "background"
#: Called with the step, the phase that begins, and its detail; ``str(detail)`` is for people.
Listener = Callable[[int, PhaseName, object], None]


class Collective(NamedTuple):
    """The detail of phase ``collective``: this rank's ``number``-th collective over ``scope``, counted from 1.

    All ranks of a scope enter the same collectives in the same order, each with the same number of ``values`` (0 if it
    differs between ranks). So the ranks of a scope wait for the one that has entered the fewest.
    """

    operation: str
    scope: str
    number: int
    values: int

    def __str__(self) -> str:
        size = f" of {self.values} values" if self.values else ""
        return f"{self.operation}{size}, number {self.number} over {self.scope}"


class Exchange(NamedTuple):
    """The detail of phases ``send`` and ``receive``: a message, and the rank at its other end."""

    message: object
    rank: int

    def __str__(self) -> str:
        return f"{self.message}, rank {self.rank}"


#: A phase and its detail.
Doing = tuple[PhaseName, object]


class Activity:
    """The current phase of one thread of one rank.

    Every change is reported before the work that it announces: first to the ``recorder``, if there is one, then to the
    ``timers``, and last to the ``listeners``, which may take time. ``members`` are the ranks of each scope in which
    this rank takes part in collectives.
    """

    __slots__ = ("_detail", "_name", "_numbers", "_step", "listeners", "members", "recorder", "timers")

    def __init__(self) -> None:
        self.recorder: Listener | None = None
        self.timers: list[Listener] = []
        self.listeners: list[Listener] = []
        self.members: dict[str, tuple[int, ...]] = {}
        self._step = 0
        self._name: PhaseName = "start"
        self._detail: object = ""
        self._numbers: Counter[str] = Counter()

    @property
    def now(self) -> Doing:
        """The current phase and its detail."""
        return self._name, self._detail

    def step(self, number: int) -> None:
        """Begin step ``number``: later reports carry this number."""
        self._step = number

    def enter(self, name: PhaseName, detail: object = "") -> None:
        """Enter phase ``name``. ``detail`` is formatted only by those that print it."""
        self._name, self._detail = name, detail
        if self.recorder is not None:
            self.recorder(self._step, name, detail)
        for timer in self.timers:
            timer(self._step, name, detail)
        for listener in self.listeners:
            listener(self._step, name, detail)

    def heartbeat(self, what: Doing | None = None) -> None:
        """Report progress within the current phase, so that the watchdog does not take it for a hang.

        Only the recorder is called. ``what`` is the phase of another thread for which this one waits, by default the
        current phase. Threads that work for this one while it waits may call this too.
        """
        if self.recorder is not None:
            self.recorder(self._step, *(what or self.now))

    def within(self, name: PhaseName, detail: object = "") -> Within:
        """A context in phase ``name``; at its end the phase before it resumes."""
        return Within(self, name, detail)

    def collective(self, operation: str, scope: str, values: int) -> Within:
        """Count a collective that is about to begin. The context is for its start, and again for the wait for it."""
        self._numbers[scope] += 1
        return Within(self, "collective", Collective(operation, scope, self._numbers[scope], values))

    def in_background(self) -> BackgroundActivity:
        """The activity of another thread of this rank, with the same listeners but without recorder and timers."""
        return BackgroundActivity(self)


class Within:
    """A phase that ends with its block. An exception leaves the phase as it is, so that errors can name it."""

    __slots__ = ("_activity", "_before", "_detail", "_name")

    def __init__(self, activity: Activity, name: PhaseName, detail: object) -> None:
        self._activity, self._name, self._detail = activity, name, detail

    def __enter__(self) -> None:
        self._before = self._activity.now
        self._activity.enter(self._name, self._detail)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._activity.enter(*self._before)


class BackgroundActivity(Activity):
    """The activity of a background thread, on the rank of ``activity``.

    Its collectives are counted over a scope of their own. ``said`` is the last phase that it reported, a new tuple each
    time; a thread that waits for this one passes it on as a heartbeat.
    """

    __slots__ = ("said",)

    def __init__(self, activity: Activity) -> None:
        super().__init__()
        self.listeners, self._step = activity.listeners, activity._step
        if "world" in activity.members:
            activity.members[BACKGROUND] = activity.members["world"]
        self.recorder = self._note
        self.said: Doing | None = None

    def collective(self, operation: str, scope: str, values: int) -> Within:
        """Count a collective that is about to begin, between the background threads of all ranks."""
        return super().collective(operation, BACKGROUND, values)

    def _note(self, step: int, name: PhaseName, detail: object) -> None:
        self.said = name, detail

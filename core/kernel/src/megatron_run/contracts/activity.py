"""What this rank is doing right now, for those who watch it from outside or disturb it on purpose. No torch.

The trainer and everything below it say each change; a change that nobody listens to costs a few attributes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Literal, NamedTuple

#: What a rank can be doing. ``start`` until the first step is begun, ``end`` once there is nothing left to train.
PhaseName = Literal[
    "start", "data", "forward", "backward", "recompute", "send", "receive", "collective", "gradient-reduce",
    "optimizer", "parameter-gather", "observe", "evaluate", "generate", "capture", "load", "save", "save-shard",
    "save-manifest", "save-rename", "save-latest", "save-retention", "save-flush", "end",
]  # fmt: skip
#: The scope over which a thread that works beside the training meets those of the other ranks.
BESIDE = "beside"
#: Called with the step, the phase that begins and its detail, of which ``str`` is the text.
Listener = Callable[[int, PhaseName, object], None]


class Collective(NamedTuple):
    """The detail of ``collective``: this rank's ``number``-th ``operation`` over ``scope``, counted from 1.

    All ranks of a scope enter the same collectives, of as many ``values`` (0 where that differs), in the same order:
    who has entered fewer is the one that the others wait for.
    """

    operation: str
    scope: str
    number: int
    values: int

    def __str__(self) -> str:
        size = f" of {self.values} values" if self.values else ""
        return f"{self.operation}{size}, number {self.number} over {self.scope}"


class Exchange(NamedTuple):
    """The detail of ``send`` and ``receive``: a message, and the rank without which it does not get through."""

    message: object
    rank: int

    def __str__(self) -> str:
        return f"{self.message}, rank {self.rank}"


#: A phase and its detail.
Doing = tuple[PhaseName, object]


class Activity:
    """The phases of one thread of one rank.

    ``recorder``, if there is one, the ``timers``, and then the ``listeners``, who may take time over it, are told of
    every change, before what it announces is done. ``members`` are the ranks of each scope in which this rank takes
    part in collectives.
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
        """What comes is part of step ``number``."""
        self._step = number

    def enter(self, name: PhaseName, detail: object = "") -> None:
        """From here on this rank does ``name``; ``detail`` is made into a text only where somebody wants it."""
        self._name, self._detail = name, detail
        if self.recorder is not None:
            self.recorder(self._step, name, detail)
        for timer in self.timers:
            timer(self._step, name, detail)
        for listener in self.listeners:
            listener(self._step, name, detail)

    def heartbeat(self, what: Doing | None = None) -> None:
        """What this rank does goes on, so that nobody who watches it takes it for a hang: only the recorder hears.

        ``what`` is what another thread does for which this one waits; else it is the current phase. Threads that work
        for this one while it waits for them may call it too.
        """
        if self.recorder is not None:
            self.recorder(self._step, *(what or self.now))

    def within(self, name: PhaseName, detail: object = "") -> Within:
        """A context in which this rank does ``name``, and after which it goes on with what it did before."""
        return Within(self, name, detail)

    def collective(self, operation: str, scope: str, values: int) -> Within:
        """Count a collective that is about to begin: the context for starting it, and again for waiting for it."""
        self._numbers[scope] += 1
        return Within(self, "collective", Collective(operation, scope, self._numbers[scope], values))

    def beside(self) -> BackgroundActivity:
        """The phases of another thread of this rank: the same listeners hear them; recorder and timers do not."""
        return BackgroundActivity(self)


class Within:
    """A phase that ends where its block does. What is raised inside leaves the phase as it is: that is where."""

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
    """The phases of a thread that works beside the training on the rank of ``phases``.

    Its collectives are counted over a scope of their own. ``said`` is what it said last, a new tuple each time, for the
    thread that waits for it to pass on.
    """

    __slots__ = ("said",)

    def __init__(self, activity: Activity) -> None:
        super().__init__()
        self.listeners, self._step = activity.listeners, activity._step
        if "world" in activity.members:
            activity.members[BESIDE] = activity.members["world"]
        self.recorder = self._note
        self.said: Doing | None = None

    def collective(self, operation: str, scope: str, values: int) -> Within:
        """Count a collective that is about to begin: over such threads of all ranks."""
        return super().collective(operation, BESIDE, values)

    def _note(self, step: int, name: PhaseName, detail: object) -> None:
        self.said = name, detail

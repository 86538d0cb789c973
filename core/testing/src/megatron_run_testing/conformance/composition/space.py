"""The space that compositions are drawn from, how one is drawn, what it asks for, and how it is made simpler.

A composition names an option of each axis, so that it can be made simpler axis by axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from shlex import quote
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_run.config.fields import walk
from megatron_run.config.request import Request
from megatron_run.contracts.plugin import RUN_KINDS
from megatron_run.errors import InputError
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run.registry.loaded_plugin import Plugin
from megatron_run_testing.conformance.composition.axes import (
    BASE,
    CARRIED_OUT,
    DOCUMENTS,
    HALF,
    LEARNED,
    SPLITS,
    Axis,
    Settings,
    Sizes,
)

#: A run that goes on elsewhere saves the step from which it does.
RESUMED: Settings = (f"checkpoint.interval={HALF}",)
#: What a run has that chooses none.
_DEFAULTS = {"model": "gpt", "data": "mock", "optimizer": "adamw"}


@dataclass(frozen=True)
class Space:
    """The space that compositions are drawn from.

    ``splits`` begin with the single process. ``options`` are, by section and plugin, the option models of what is
    installed: a setting that the chosen plugin does not have is left out. ``more`` are settings of every run.
    """

    learned: tuple[Axis, ...] = LEARNED
    carried_out: tuple[Axis, ...] = CARRIED_OUT
    splits: tuple[Sizes, ...] = SPLITS
    options: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    more: Settings = ()

    @classmethod
    def of_installed(cls, more: Settings = ()) -> Space:
        """Everything that is installed: options that name another plugin are left out, further schedules are added."""
        catalog = scan()
        known = {str(entry) for entry in catalog.entries}
        named = {setting.partition(",")[0] for axis in CARRIED_OUT for option in axis.options for setting in option}
        others = [str(entry) for entry in catalog.of_kind("schedule") if entry.name != "sequential"]
        further = [option for each in others if each not in named for option in ((each,), (each, "parallel.chunks=2"))]

        def offered(axis: Axis) -> Axis:
            options = [option for option in axis.options if _plugins_of(option) <= known]
            return axis._replace(options=[*options, *(further if axis.name == "schedule" else ())])

        learned, carried_out = (tuple(map(offered, axes)) for axes in (LEARNED, CARRIED_OUT))
        unserved = {axis.needs for axis in carried_out if not axis.options}
        carried_out = tuple(axis for axis in carried_out if axis.options)
        splits = tuple(sizes for sizes in SPLITS if all(getattr(sizes, name) == 1 for name in unserved))
        chosen = {plugin for axis in learned for option in axis.options for plugin in _plugins_of(option)}
        chosen |= {f"{kind}={name}" for kind, name in _DEFAULTS.items()}
        options = {
            (entry.kind, entry.name): _fields(load(entry, "plugins check").options_model)
            for entry in catalog.entries
            if str(entry) in chosen and entry.kind in _DEFAULTS
        }
        return cls(learned, carried_out, splits, options, more)

    def around(self, plugin: Plugin) -> Space:
        """The part whose compositions all contain ``plugin``.

        The single process has it too, but for a schedule, a capture and layers that split: it is compared with itself.
        Raises :class:`InputError` for a kind that has no part in what is learned.
        """
        kind, choice = plugin.kind, f"{plugin.kind}={plugin.reference}"
        space = replace(self, options={**self.options, (kind, plugin.reference): _fields(plugin.options_model)})
        if kind == "schedule":
            pipelined = "parallel.pipeline" in plugin.provides
            axis = Axis(kind, [(choice,), (choice, "parallel.chunks=2")], needs="pipeline" if pipelined else "")
            return space._fixed("schedule", axis, learned=False)._split(axis.needs)
        if kind == "graph-capture":
            return space._fixed("capture", Axis("capture", [(choice,)]), learned=False)
        if kind == "parallel-layer" and "parallel.tensor" in plugin.provides:
            return space._fixed("layer", Axis("layer", [(choice,)], needs="tensor"), learned=False)._split("tensor")
        if kind == "parallel-layer" and "parallel.context" in plugin.provides:
            axis = Axis("pieces", [(f"{kind}=+{plugin.reference}",)], needs="context")
            return space._fixed("pieces", axis, learned=False)._split("context")
        if kind == "parallel-layer":
            stacked = f"{kind}=+{plugin.reference}" if plugin.takes("base") else choice
            return space._fixed("adapters", Axis("adapters", [(stacked,)]))
        axes = {"optimizer": "update", "scaler": "scaler", "model": "network", "data": "data"}
        if kind not in axes:
            raise InputError(
                f"{plugin} has nothing to compose",
                why=f"a plugin of kind {kind} has no part in what is learned",
                fix=f"run its conformance suite: megatron-run plugins check {quote(choice)}",
            )
        return space._fixed(axes[kind], Axis(axes[kind], [(choice,)]))

    def _fixed(self, name: str, axis: Axis, *, learned: bool = True) -> Space:
        """With ``axis`` in the place of the one of that ``name``."""
        kept, others = self.learned, self.carried_out
        kept, others = (tuple(each for each in axes if each.name != name) for axes in (kept, others))
        return (
            replace(self, learned=(*kept, axis), carried_out=others)
            if learned
            else replace(self, learned=kept, carried_out=(axis, *others))
        )

    def _split(self, needs: str) -> Space:
        """With the single process, and the splits in which the size ``needs`` is above 1."""
        if not needs:
            return self
        return replace(self, splits=(Sizes(), *(each for each in self.splits if getattr(each, needs) > 1)))

    @cached_property
    def axes(self) -> Mapping[str, Axis]:
        """Every axis by name; of ``then``, the ranks on which a run goes on, the first option is: it does not."""
        ranks = Axis("ranks", [sizes.settings for sizes in self.splits])
        then = Axis("then", [(), *ranks.options])
        return {axis.name: axis for axis in (*self.learned, ranks, then, *self.carried_out)}

    def draw(self, random: Random) -> Composition:
        """Draw one. Two thirds of the axes keep their simplest option: few things meet at a time, but any two do."""
        choices = {
            name: random.randrange(len(axis.options)) for name, axis in self.axes.items() if random.random() < 1 / 3
        }
        choices["ranks"] = random.randrange(1, len(self.splits))  # there is something to compare
        return Composition(tuple((name, number) for name, number in choices.items() if number), self)


@dataclass(frozen=True)
class Composition:
    """The number of the chosen option of some axes; of the others it is 0, the simplest."""

    choices: tuple[tuple[str, int], ...]
    space: Space = field(repr=False, compare=False)

    @property
    def sizes(self) -> Sizes:
        """Of its first attempt."""
        return self.space.splits[dict(self.choices).get("ranks", 0)]

    @property
    def minimal(self) -> bool:
        """Whether it has no choice but its ranks, and two of them."""
        return self.sizes.world <= 2 and all(name == "ranks" for name, _ in self.choices)

    def barest(self) -> Iterator[Composition]:
        """Its ranks alone, or fewer of them; the fewest first."""
        everything = [number for number, sizes in enumerate(self.space.splits) if sizes.within(self.sizes) and number]
        numbers = [*everything, dict(self.choices).get("ranks", 0)]
        for number in sorted(numbers, key=lambda number: self.space.splits[number].world):
            yield replace(self, choices=(("ranks", number),))

    def with_one(self) -> Iterator[Composition]:
        """Its ranks and one more choice."""
        if len(self.choices) > 2:
            ranks = tuple(choice for choice in self.choices if choice[0] == "ranks")
            yield from (replace(self, choices=(*ranks, each)) for each in self.choices if each not in ranks)

    def simpler(self) -> Iterator[Composition]:
        """Every composition with the simplest option of one more axis, or with fewer ranks."""
        for choice in self.choices:
            yield replace(self, choices=tuple(other for other in self.choices if other != choice))
        for number, sizes in enumerate(self.space.splits):
            if number and sizes.within(self.sizes):
                yield replace(self, choices=tuple({**dict(self.choices), "ranks": number}.items()))

    def contains(self, other: Composition) -> bool:
        """Whether it has all choices of ``other``, on as many ranks or more."""
        required = {choice for choice in other.choices if choice[0] != "ranks"}
        return required <= set(self.choices) and (other.sizes == self.sizes or other.sizes.within(self.sizes))

    @property
    def rounded(self) -> bool:
        """Whether the run computes in 16 bits."""
        return any(each.startswith("train.precision=") for each in self._learned)

    @property
    def reference(self) -> Request:
        """The single process that learns the same."""
        return self._request(self._learned, 1)

    @property
    def attempts(self) -> list[Request]:
        """The run: one attempt, or another one that goes on from the middle, on other ranks.

        It goes on from a step that the first one saved while it trained, asynchronously where it does that.
        """
        chosen, splits = dict(self.choices), self.space.splits
        if "then" not in chosen:
            return [self._attempt(self.sizes)]
        first, then = (self._attempt(sizes, RESUMED) for sizes in (self.sizes, splits[chosen["then"] - 1]))
        return [first, replace(then, resume=str(HALF))]

    @property
    def _learned(self) -> Settings:
        return tuple(each for axis in self.space.learned for each in self._settings(axis))

    def _settings(self, axis: Axis) -> Settings:
        return axis.options[dict(self.choices).get(axis.name, 0)]

    def _attempt(self, sizes: Sizes, more: Settings = ()) -> Request:
        """One attempt, with ``more`` where nothing else is said. What its sizes leave without an effect is left out."""
        if not any(each.startswith("model.experts.count=") for each in self._learned):
            sizes = sizes._replace(expert=1)
        if any(each.startswith("model.experts.capacity_factor=") for each in self._learned):
            sizes = sizes._replace(context=1)  # which tokens are dropped depends on those beside them on a rank
        axes = [axis for axis in self.space.carried_out if not axis.needs or getattr(sizes, axis.needs) > 1]
        carried = [each for axis in axes for each in self._settings(axis)]
        return self._request((*more, *self._learned, *carried, *sizes.settings), sizes.world)

    def _request(self, settings: Settings, world: int) -> Request:
        """The last word for a key counts; a key of a plugin's that the chosen one does not have is left out."""
        words = [each.partition("=") for each in (*BASE, *settings, *self.space.more)]
        plugins = {key: value for key, _, value in words if key in RUN_KINDS and not value.startswith("+")}
        stacked = [value for key, _, value in words if key in RUN_KINDS and value.startswith("+")]
        if stacked:
            names, commas, options = zip(
                *(each.partition(",") for each in (plugins.get("parallel-layer", "dense"), *stacked)), strict=True
            )
            given = (comma + option for comma, option in zip(commas, options, strict=True))
            plugins["parallel-layer"] = "".join((*names, *given))  # options follow the names of all
        values = {key: value for key, _, value in words if key not in RUN_KINDS}
        kept = {key: value for key, value in values.items() if self._has(plugins, key, value)}
        return Request(
            configs=("preset:tiny",),
            sets=tuple(f"{key}={value}" for key, value in kept.items()),
            plugins=tuple(f"{kind}={choice}" for kind, choice in plugins.items()),
            nproc=world,
        )

    def _has(self, plugins: Mapping[str, str], key: str, value: str) -> bool:
        """Whether the chosen plugin of the section of ``key`` has it, with that value."""
        section, _, name = key.partition(".")
        chosen = plugins.get(section, _DEFAULTS.get(section, "")).partition(",")[0]
        fields = self.space.options.get((section, chosen))
        if fields is None:
            return True
        return name in fields and value in (_literals(fields[name].annotation) or {value})

    def commands(self, folder: str, documents: str) -> list[str]:
        """The commands to type: the single process, and the run in ``folder``."""
        requests = {f"{folder}/alone": [self.reference], f"{folder}/split": self.attempts}
        return [_command(each, documents, home) for home, several in requests.items() for each in several]

    def __str__(self) -> str:
        axes = self.space.axes
        said = [f"{name}: {' '.join(axes[name].options[number]) or 'one rank'}" for name, number in self.choices]
        return "; ".join(said) or "the simplest"


def with_documents(request: Request, documents: str) -> Request:
    """``request`` with the prefix of the documents that were written."""
    return replace(request, sets=tuple(each.replace(DOCUMENTS, documents) for each in request.sets))


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of ``model`` by dotted name."""
    return {".".join(key): field for key, field in walk(model)}


def _plugins_of(option: Settings) -> set[str]:
    """The installed plugins that ``option`` names: ``kind=name``."""
    choices = (setting.partition(",")[0] for setting in option)
    return {choice.replace("=+", "=") for choice in choices if choice.partition("=")[0] in RUN_KINDS}


def _literals(annotation: Any) -> set[str]:
    """The values of an annotation ``Literal[...]`` as they are written; empty for any other."""
    if get_origin(annotation) is not Literal:
        return set()
    return {str(value).lower() if isinstance(value, bool) else str(value) for value in get_args(annotation)}


def _command(request: Request, documents: str, folder: str) -> str:
    words = [str(config) for config in request.configs]
    for plugin in request.plugins:
        words += ["--plugin", plugin]
    for each in with_documents(request, documents).sets:
        if not each.startswith(("observer.", "run.", "guard.")):
            words += ["--set", each]
    if request.nproc and request.nproc > 1:
        words += ["--nproc", str(request.nproc)]
    words += ["--set", f"run.folder={folder}", *(() if request.resume == "auto" else ("--resume", request.resume))]
    return " ".join(["megatron-run", *map(quote, words)])

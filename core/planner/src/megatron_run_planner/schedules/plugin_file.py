"""Writes lists of actions as a schedule plugin of one file, which `--plugin schedule=./FILE.py` runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template

from megatron_run.contracts.schedule import Action, Place
from megatron_run.errors import InputError
from megatron_run.errors.wording import plural
from megatron_run.files.publishing import publishing

#: The file. ``LISTS`` serve any number of microbatches: fewer leave out the others' actions, more begin again.
_FILE = Template(
    '''"""A schedule found by search: $shape.

$about
"""

from __future__ import annotations

from megatron_run.contracts import PluginInfo, Schedule
from megatron_run.contracts.schedule import Action, LayoutSpec, Place, ScheduleSpec, split_layers
from megatron_run.errors import ScheduleError
from megatron_run.hookspecs import hookimpl

STAGES, CHUNKS, MICROBATCHES = $stages, $chunks, $microbatches

#: (stage, chunk, layers) of each place, in model order.
PLACES = (
$places
)

#: What each stage runs, in order: F3.1 is the forward of microbatch 3 in chunk 1, I and W its two gradients.
LISTS = (
$lists
)


class Searched(Schedule):
    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        if (spec.stages, spec.chunks) != (STAGES, CHUNKS):
            raise ScheduleError(
                f"this schedule was found for {STAGES} stages x {CHUNKS} chunks, got {spec.stages} x {spec.chunks}",
                fix=f"set parallel.pipeline={STAGES} and parallel.chunks={CHUNKS}",
            )
        counts = [layers for _, _, layers in PLACES]
        if spec.counts or spec.layers != sum(counts):
            layers = split_layers(spec)
        else:
            layers = tuple(range(sum(counts[:index]), sum(counts[: index + 1])) for index in range(len(counts)))
        return tuple(Place(stage, chunk, part) for (stage, chunk, _), part in zip(PLACES, layers, strict=True))

    def actions(self, spec: ScheduleSpec) -> list[list[Action]]:
        return [repeated([Action.parse(word) for word in words.split()], spec.microbatches) for words in LISTS]


def repeated(actions: list[Action], microbatches: int) -> list[Action]:
    """The list for another number of microbatches: from the start again for more, without the others for fewer."""
    rounds = (
        action._replace(microbatch=first + action.microbatch)
        for first in range(0, microbatches, MICROBATCHES)
        for action in actions
    )
    return [action for action in rounds if action.microbatch < microbatches]


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    shape = {"parallel.pipeline": STAGES, "parallel.chunks": CHUNKS}
    return PluginInfo("schedule", "$name", provides=frozenset(shape), suggests=shape)


@hookimpl
def megatron_run_create_schedule() -> Schedule:
    return Searched()
'''
)


def plugin_text(
    name: str, layout: Sequence[Place], lists: Sequence[Sequence[Action]], microbatches: int, about: str
) -> str:
    """The plugin's source. ``name`` is the file's, without suffix; ``about`` says in a line where it comes from."""
    stages, chunks = len(lists), len(layout) // len(lists)
    shape = f"{plural(stages, 'stage')} x {plural(chunks, 'chunk')}, {plural(microbatches, 'microbatch')}"
    return _FILE.substitute(
        name=name,
        about=about,
        shape=shape,
        stages=stages,
        chunks=chunks,
        microbatches=microbatches,
        places="\n".join(f"    ({stage}, {chunk}, {len(layers)})," for stage, chunk, layers in layout),
        lists="\n".join(f'    "{" ".join(map(str, actions))}",' for actions in lists),
    )


def write_plugin(
    file: Path, layout: Sequence[Place], lists: Sequence[Sequence[Action]], microbatches: int, about: str
) -> None:
    """Write the plugin. Raises :class:`InputError` for a file that cannot be one, or cannot be written."""
    if file.suffix != ".py":
        raise InputError(f"{file} is no Python file", why="a schedule is a plugin", fix=f"name it {file.stem}.py")
    try:
        with publishing(file) as (written,):
            written.write(plugin_text(file.stem, layout, lists, microbatches, about).encode())
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}", fix="name another file") from None

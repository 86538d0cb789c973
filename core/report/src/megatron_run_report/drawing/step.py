"""The planned step of a run as a picture, made anew by its schedule: of an installed plugin, never of a file."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any, NamedTuple

from markupsafe import Markup
from pydantic import ValidationError

from megatron_run.contracts.schema import ParallelSection
from megatron_run.errors import RunError
from megatron_run.pipeline.picture import schedule_svg
from megatron_run.pipeline.simulate import timeline
from megatron_run.planning.plans import plan_run
from megatron_run.registry.choose import choose, is_file
from megatron_run.registry.discover import scan
from megatron_run.registry.importing import no_files_run
from megatron_run.registry.load import load

#: The most actions that are drawn: a step of more is drawn with fewer microbatches.
ACTIONS = 2000
#: The longest step, in forwards of a chunk, that is shown as wide as the page.
WIDE = 48


class Drawn(NamedTuple):
    """A picture as the address of an image, with a note; without one the note says why.

    ``wide`` says that it is too wide to be shown as wide as the page.
    """

    picture: Markup
    note: str
    wide: bool = False


def step_drawn(keys: Mapping[str, Any], microbatches: int | None) -> Drawn:
    """The step of a run with the configuration ``keys``, which somebody else may have written."""
    name = keys.get("schedule.use")
    if not isinstance(name, str) or microbatches is None:
        return Drawn(Markup(), "the run does not tell its schedule and its microbatches")
    if is_file(name):
        return Drawn(Markup(), f"{name} is a file, and a report runs no file that a run names")
    parallel = {key.partition(".")[2]: value for key, value in keys.items() if key.startswith("parallel.")}
    options = {key.partition(".")[2]: value for key, value in keys.items() if key.startswith("schedule.")}
    try:
        section = ParallelSection.model_validate(
            {key: value for key, value in parallel.items() if key in ParallelSection.model_fields}
        )
        count = _fewer(microbatches, section.pipeline, section.chunks)
        if not count:
            return Drawn(Markup(), f"a step has more than {ACTIONS} actions")
        layers = keys.get("model.num_layers")
        if type(layers) is not int:
            return Drawn(Markup(), "the run does not tell its layers")
        with no_files_run():  # an option of an installed plugin may name one
            plugin = load(choose(scan(), "schedule", name, "the run's schedule.use"), "the run's schedule.use")
            chosen = {key: value for key, value in options.items() if key != "use"}
            plugin = plugin.with_options(plugin.options_model.model_validate(chosen))
            plan = plan_run(plugin, layers, section, (count,))[1][count]
    except RunError as error:
        return Drawn(Markup(), str(error))
    except ValidationError as error:
        return Drawn(Markup(), f"its options are those of another version: {error.errors()[0]['msg']}")
    note = "" if count == microbatches else f"drawn with {count} of {microbatches} microbatches"
    picture = b64encode(schedule_svg(plan, str(plugin)).encode()).decode()
    return Drawn(Markup("data:image/svg+xml;base64,{}").format(picture), note, wide=timeline(plan).makespan > WIDE)


def _fewer(microbatches: int, stages: int, chunks: int) -> int:
    """As many of ``microbatches`` as can be drawn, a multiple of the stages where they are not all; 0 for none."""
    most = ACTIONS // (2 * stages * chunks)
    return microbatches if microbatches <= most else most // stages * stages

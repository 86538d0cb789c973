"""observer=tensorboard: losses, rates, the resolved run as text and the pipeline of one step as a picture."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from shutil import which
from typing import TYPE_CHECKING

from megatron_run.contracts import EvalMetrics, Observer, PluginInfo, RunSummary, StepMetrics
from megatron_run.files.run_names import shown_name
from megatron_run.hookspecs import hookimpl

if TYPE_CHECKING:
    from megatron_run_observer_tensorboard.events import EventFile


class TensorBoard(Observer):
    """Writes ``tensorboard/`` in the run folder; :func:`shown_by` shows it during the run."""

    def __init__(self) -> None:
        self._file: EventFile | None = None
        self._folder = Path()

    def on_train_start(self, run: RunSummary) -> None:
        """Open the file; write configuration, plan, baselines and the timeline. Raises OSError when it cannot."""
        from megatron_run_observer_tensorboard.events import EventFile
        from megatron_run_observer_tensorboard.picture import draw

        before = run.first_step - 1
        self._folder = run.folder
        self._file = EventFile(run.folder / "tensorboard", run.first_step)
        self._file.text("run/config", f"```yaml\n{run.config}\n```", before)
        self._file.text("run/plan", f"```\n{run.plan}\n```", before)
        self._file.image("vitals/pipeline", draw(run.timeline), before)
        for name, loss in run.baselines.items():
            for step in (before, run.steps):  # two points: a line to compare the loss with
                self._file.scalars({f"validation/baseline_{name.replace(' ', '_')}": loss}, step)
        self._file.flush()

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Write every number of the step; those of ``extra`` by their own names under ``vitals/``."""
        self._write(metrics.curves(), metrics.step, metrics.time)

    def on_eval_end(self, metrics: EvalMetrics) -> None:
        """Write ``validation/loss`` and ``validation/perplexity``; of other splits ``validation_test/loss``."""
        self._write(metrics.curves(), metrics.step)

    def on_later_eval(self, folder: Path, metrics: EvalMetrics) -> None:
        """Write the curves to a file of their own, which leaves those of the training as they are."""
        from megatron_run_observer_tensorboard.events import EventFile

        file = EventFile(folder / "tensorboard")
        file.scalars(_tags(metrics.curves()), metrics.step)
        file.close()

    def on_sample(self, text: str) -> None:
        """Write the text verbatim: indented, so that TensorBoard does not read it as Markdown."""
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        self._opened().text("eval/sample", indented, self._opened().last_step)
        self._opened().flush()

    def on_error(self, error: BaseException) -> None:
        """Close the file."""
        self._close()

    def on_train_end(self, reason: str) -> None:
        """Close the file, and say what shows it."""
        if self._file is not None:
            sys.stdout.write(f"to see it in TensorBoard: {shown_by(self._folder)}\n")
            sys.stdout.flush()
        self._close()

    def _write(self, numbers: Mapping[str, float], step: int, time: float | None = None) -> None:
        self._opened().scalars(_tags(numbers), step, time)
        self._opened().flush()

    def _opened(self) -> EventFile:
        if self._file is None:
            raise RuntimeError("its file in the run folder is not open")
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _tags(numbers: Mapping[str, float]) -> dict[str, float]:
    """``numbers`` by tags in the groups train, validation and vitals.

    TensorBoard sorts groups by name, and opens its page with only the first two unfolded.
    """
    tags = {}
    for name, number in numbers.items():
        group, _, rest = name.partition("/")
        if group == "train":
            tags[name] = number
        elif group == "eval" or group.startswith("eval_"):
            tags[f"validation{group.removeprefix('eval')}/{rest}"] = number
        else:
            tags[f"vitals/{name.replace('/', '_')}"] = number
    return tags


def shown_by(folder: Path) -> str:
    """The command that shows the run in ``folder`` by its name, with paths as short as they are from here.

    ``--logdir RUN`` calls every run ``tensorboard``, but no path is too odd for it: commas and colons mean something to
    ``--logdir_spec``.
    """
    beside = Path(sys.executable).with_name("tensorboard")  # an environment need not be active
    program = "tensorboard" if which("tensorboard") or not beside.exists() else _from_here(beside)
    path = _from_here(folder)
    if {",", ":"} & {*path}:
        return f"{program} --logdir {quote(path)}"
    return f"{program} --logdir_spec {quote(f'{shown_name(folder)}:{path}')}"


def _from_here(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Plugin tensorboard of kind observer."""
    return PluginInfo("observer", "tensorboard")


@hookimpl
def megatron_run_create_observer() -> Observer:
    """Make the observer; tensorboard itself is imported when training starts."""
    return TensorBoard()

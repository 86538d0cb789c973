"""``megatron-run finetune --task``: one of the paper's tasks by its recipe, with one seed or the median of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatron_run.config.origin import Origin, Value
from megatron_run.config.validate import validate
from megatron_run.contracts import DataSource
from megatron_run.errors import Findings, InputError
from megatron_run.registry.choose import choose
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run.registry.loaded_plugin import Plugin
from megatron_run_cli.output import print_table, tell

#: The plugin of kind data that reads the tasks.
_TASKS = "nlu"
#: The first seed unless --set train.seed says otherwise, and where the runs lie unless run.folder does.
SEED, FOLDER = 1234, "runs/finetuned"


def as_task(chosen: dict[str, Any], task: str, folder: str, settings: Sequence[str]) -> None:
    """Change what is trained into ``task``, whose published files are in ``folder``: head, data and recipe.

    Raises :class:`RunError` where the plugin of the tasks is not installed, or has no recipe for the model.
    """
    origin = f"--task {task}"
    plugin = load(choose(scan(), "data", _TASKS, origin), origin)
    keys = {"task": task, "folder": str(Path(folder).absolute())}
    keys |= {key: value for key, value in chosen["data"].items() if key == "tokenizer"}
    of_data = (setting for setting in settings if setting.startswith("data.") and "=" in setting)
    given = [setting.removeprefix("data.").partition("=") for setting in of_data]
    values = {key: Value(value, Origin("command line", origin)) for key, value in keys.items()}
    values |= {
        key: Value(value, Origin("command line", f"--set data.{key}")) for key, _, value in given if key != "use"
    }
    source = _source(plugin, values)
    recipe = source.recipe(chosen["model"], chosen["train"]["sequence_length"])
    if recipe is None:
        raise InputError(f"{plugin} has no recipe for {task}", origin=origin, fix="leave --task out")
    chosen["model"] = {**chosen["model"], **recipe.model}
    chosen["data"] = {"use": _TASKS, **keys}
    chosen["train"] = dict(recipe.train)
    tell(recipe.summary)


def _source(plugin: Plugin, values: Mapping[str, Value]) -> DataSource:
    """The samples with these options. Raises :class:`Problems` for those that are wrong."""
    findings = Findings()
    options = validate(plugin.options_model, ("data",), {(key,): value for key, value in values.items()}, findings)
    findings.settle()
    assert options is not None, "what is wrong was raised"
    source: DataSource = plugin.with_options(options).create()
    return source


def repeat(start: Callable[..., int], seeds: int, settings: Sequence[str], *, quiet: bool) -> int:
    """Train with ``seeds`` seeds, each in a folder of its own, and print every metric with its median.

    ``start`` trains with further settings. The first run that fails ends it with that run's code.
    """
    from megatron_run_engine.data.user_files import json_line, text_lines

    given = dict(setting.split("=", 1) for setting in settings if setting.startswith(("train.seed=", "run.folder=")))
    home, first = Path(given.get("run.folder", FOLDER)), int(given.get("train.seed", SEED))
    found = []
    for seed in range(first, first + seeds):
        folder = home / f"seed-{seed}"
        code = start(f"train.seed={seed}", f"run.folder={folder}")
        if code:
            return code
        lines = (json_line(line) for _, line in text_lines(folder / "eval.jsonl"))
        last = [line for line in lines if line["split"] == "validation"][-1]
        found.append({"loss": last["loss"], **last.get("extra", {})})
        if not quiet:
            tell(f"seed {seed}: " + ", ".join(f"{name} {value:.4g}" for name, value in found[-1].items()))
    rows = [("metric", f"median of {seeds} seeds", "least", "most")]
    for name in found[0]:
        values = [each[name] for each in found]
        rows.append((name, *(f"{of(values):.4g}" for of in (median, min, max))))
    print_table(rows)
    return 0

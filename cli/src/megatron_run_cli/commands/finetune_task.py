"""``megatron-run finetune --task``: one of the paper's tasks by its recipe, with one seed or the median of several."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from megatron_run.errors import InputError, how_to_install
from megatron_run_cli.output import print_table, tell

if TYPE_CHECKING:
    from megatron_run_data_nlu.questions import Task

#: The first seed unless --set train.seed says otherwise, and where the runs lie unless run.folder does.
SEED, FOLDER = 1234, "runs/finetuned"


def as_task(chosen: dict[str, Any], task: str, folder: str, words: Sequence[str]) -> None:
    """Change what is trained into ``task``, whose published files are in ``folder``: head, data and recipe.

    Raises :class:`InputError` for a model other than bert, and where the package of the tasks is not installed.
    """
    try:
        from megatron_run_data_nlu.recipes import recipe
    except ModuleNotFoundError as cause:
        raise InputError(f"--task {task} needs data=nlu", fix=how_to_install("megatron-run-data-nlu")) from cause
    model = chosen["model"]
    if model.get("use") != "bert":
        raise InputError(f"--task {task} trains model=bert", why=f"the model is {model.get('use')}")
    rows = model.get("choices") or 1
    longest = model.get("max_positions") or chosen["train"]["sequence_length"] // rows
    name, found = recipe(cast("Task", task), model["num_layers"], model["hidden_size"])
    chosen["model"] = {**model, **found.model, "max_positions": longest}
    kept = {"tokenizer": chosen["data"]["tokenizer"]} if "tokenizer" in chosen["data"] else {}
    chosen["data"] = {"use": "nlu", "task": task, "folder": str(Path(folder).absolute()), **kept}
    row = found.rows * min(found.row, longest)
    chosen["train"] = found.train(_samples(chosen["data"], row, words), longest)
    tell(f"{task} by the recipe of the {name} model: {found.epochs} epochs")


def _samples(data: Mapping[str, Any], length: int, words: Sequence[str]) -> int:
    """How many samples the training split has."""
    from megatron_run_data_nlu import NluOptions, megatron_run_create_data

    keys = dict(word.removeprefix("data.").split("=", 1) for word in words if word.startswith("data.") and "=" in word)
    options = NluOptions.model_validate({key: value for key, value in {**data, **keys}.items() if key != "use"})
    return len(megatron_run_create_data(options).dataset("train", length, 0))


def repeat(start: Callable[..., int], seeds: int, words: Sequence[str], *, quiet: bool) -> int:
    """Train with ``seeds`` seeds, each in a folder of its own, and print every metric with its median.

    ``start`` trains with further settings. The first run that fails ends it with that run's code.
    """
    given = dict(word.split("=", 1) for word in words if word.startswith(("train.seed=", "run.folder=")))
    home, first = Path(given.get("run.folder", FOLDER)), int(given.get("train.seed", SEED))
    found = []
    for seed in range(first, first + seeds):
        folder = home / f"seed-{seed}"
        code = start(f"train.seed={seed}", f"run.folder={folder}")
        if code:
            return code
        lines = (folder / "eval.jsonl").read_text(encoding="utf-8").splitlines()
        last = [line for line in map(json.loads, lines) if line["split"] == "validation"][-1]
        found.append({"loss": last["loss"], **last.get("extra", {})})
        if not quiet:
            tell(f"seed {seed}: " + ", ".join(f"{name} {value:.4g}" for name, value in found[-1].items()))
    rows = [("metric", f"median of {seeds} seeds", "least", "most")]
    for name in found[0]:
        values = [each[name] for each in found]
        rows.append((name, *(f"{of(values):.4g}" for of in (median, min, max))))
    print_table(rows)
    return 0

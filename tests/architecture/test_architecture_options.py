"""Whoever owns an option owns its name: no other part of the house writes down a model's keys."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_run.config.fields import walk
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from tests.support.checkout import ROOT

#: Options that the kernel's contracts ask of every model, or of one with experts.
OF_EVERY_MODEL = {"num_layers", "vocab_size", "experts.count", "experts.top_k"}
#: Where a model's keys may be named, and why.
ROOMS = {
    "core/engine/src/megatron_run_engine/builtin/model": "their owner",
    "core/engine/src/megatron_run_engine/nn": "layers that say which key of their size does not fit",
    "core/engine/src/megatron_run_engine/estimate/calibration": "trains models gpt of sizes that it chooses",
    "core/engine/src/megatron_run_engine/training/build.py": "advice on a tensor that is too large",
    "core/engine/src/megatron_run_engine/training/state/keeping.py": "whether positions limit a text's length",
    "core/kernel/src/megatron_run/contracts/parallel_layer.py": "advice where a factory has no loss in chunks",
}


def model_keys() -> set[str]:
    """The options of all models, by dotted name."""
    models = [load(entry, "").options_model for entry in scan().of_kind("model")]
    return {".".join(key) for model in models for key, _ in walk(model)} - OF_EVERY_MODEL


def named(source: str, keys: set[str]) -> Iterator[str]:
    """The keys that texts in ``source`` name: ``model.`` before one, or one of a group alone. Docstrings do not."""
    tree = ast.parse(source)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    words = "|".join(map(re.escape, sorted(keys, key=len, reverse=True)))
    pattern = re.compile(rf"(?<![\w.])model\.({words})(?!\w)")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from pattern.findall(node.value)
            if "." in node.value and node.value in keys:
                yield node.value


def test_no_other_part_of_the_core_names_a_models_options() -> None:
    keys = model_keys()
    files = [
        file
        for root in ("core/kernel", "core/engine", "core/planner", "core/sweep", "cli")
        for file in _sources(ROOT / root)
    ]
    found = {str(file.relative_to(ROOT)): sorted({*named(file.read_text("utf-8"), keys)}) for file in files}
    said = {file: names for file, names in found.items() if names}
    assert {file: names for file, names in said.items() if not _has_room(file)} == {}
    assert [room for room in ROOMS if not any(_lies_in(file, room) for file in said)] == [], "it needs no room"


def test_a_list_of_keys_is_found() -> None:
    keys = {"rope.theta", "dropout"}
    assert [*named('FREE = {"model.rope.theta", "model.dropout", "rope.theta", "dropout"}', keys)] == [
        "rope.theta",
        "dropout",
        "rope.theta",
    ]
    assert [*named('"""About model.dropout."""\nx = f"{a} model.rope.theta={b}"\ny = "model.rope.thetas"', keys)] == [
        "rope.theta"
    ]


def _sources(folder: Path) -> list[Path]:
    return sorted((folder / "src").rglob("*.py"))


def _has_room(file: str) -> bool:
    return any(_lies_in(file, room) for room in ROOMS)


def _lies_in(file: str, room: str) -> bool:
    return f"{file}/".startswith(f"{room}/")

"""What ``config show`` writes, ``config explain``, ``--set`` and ``--allow-change`` read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megatron_run.config.request import Request
from megatron_run.config.values import typed
from megatron_run.contracts.plugin import RUN_KINDS
from megatron_run.errors import InputError
from megatron_run.planning import ResolvedRun, resolve
from megatron_run.registry.discover import scan
from megatron_run_cli.reports import keys
from megatron_run_cli.reports.config_report import show_json
from megatron_run_cli.reports.keys import explain, installed_plugins, model_keys
from megatron_run_engine.run_folder.changes import check_names

#: What a plugin cannot do without.
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "data=indexed": {"data.paths": "texts"},
    "data=nlu": {"model.use": "bert", "model.head": "classification", "model.classes": 3},
    "data=text": {"data.paths": "texts"},
    "model=deepseek": {
        f"model.{name}": 4 for name in ("kv_rank", "rope_head_size", "nope_head_size", "value_head_size")
    },
    "observer=mlflow": {"observer.uri": "http://127.0.0.1:1"},
    "parallel-layer=context": {"parallel-layer.use": "dense+context"},
    "parallel-layer=fp8": {"parallel-layer.use": "dense+fp8"},
    "parallel-layer=lora": {"parallel-layer.use": "dense+lora"},
    "scaler=constant": {"scaler.loss_scale": 8},
}
PLUGINS = sorted(f"{entry.kind}={entry.name}" for entry in scan().entries if entry.kind in RUN_KINDS)


@pytest.fixture(scope="module", autouse=True)
def _asked_once() -> Iterator[None]:
    """Every installed plugin is imported once, and its options are described once."""
    described = cache(lambda *model: tuple(model_keys(*model)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "installed_plugins", cache(installed_plugins))
        patch.setattr(keys, "model_keys", lambda *model: iter(described(*model)))
        yield


def chosen(plugin: str, sets: Iterable[str] = ()) -> ResolvedRun:
    """A run with ``plugin``, which is beside another one where it can be."""
    kind, _, name = plugin.partition("=")
    use = f"jsonl,{name}" if kind == "observer" and name != "jsonl" else name
    values = {f"{kind}.use": use, **NEEDED.get(plugin, {})}
    return resolve(Request(("preset:tiny",), tuple(sets), values=values, environment={}), plan_only=True)


def explained(run: ResolvedRun, rows: Mapping[str, Any]) -> None:
    for key, row in rows.items():
        assert f"(from {row['origin']})" in explain(key, run), key
        assert explain(key), key
        check_names(replace(run.request, allow_change=(key,)), run)


def test_each_key_that_is_shown_of_a_run_can_be_explained_and_allowed() -> None:
    run = resolve(Request(("preset:tiny",), environment={}))
    explained(run, show_json(run))


@pytest.mark.parametrize("plugin", PLUGINS)
def test_each_option_that_is_shown_can_be_explained_allowed_and_set(plugin: str) -> None:
    run, section = chosen(plugin), f"{plugin.partition('=')[0]}."
    rows = {key: row for key, row in show_json(run).items() if key.startswith(section)}
    explained(run, rows)
    given = NEEDED.get(plugin, {}).keys() | {f"{section}use"}
    typable = {key: row["value"] for key, row in rows.items() if key not in given}
    again = show_json(chosen(plugin, [f"{key}={typed(value)}" for key, value in typable.items()]))
    assert {key: again[key]["value"] for key in typable} == typable


def test_the_value_of_an_option_is_shown_by_its_name_in_the_section_too() -> None:
    run = chosen("observer=jsonl")
    for key, row in show_json(run).items():
        section, _, rest = key.partition(".jsonl.")
        if rest:
            assert f"(from {row['origin']})" in explain(f"{section}.{rest}", run)


def test_an_entry_of_a_mapping_is_explained_as_that() -> None:
    run = chosen("optimizer=adamw", ["optimizer.rule_options={amsgrad: true}"])
    said = explain("optimizer.rule_options.amsgrad", run)
    assert said.startswith("optimizer.rule_options\n")
    assert "here       amsgrad=True (from --set optimizer.rule_options)" in said


def test_a_key_of_another_plugin_is_unknown() -> None:
    with pytest.raises(InputError, match="there is no key"):
        explain("observer.jsonl.neverheard")

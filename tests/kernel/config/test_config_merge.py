"""Precedence, origins and the grammar of the command line, before any plugin is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.config.merge import ConfigSource
from megatron_run.config.origin import Origin
from megatron_run.config.request import Request
from megatron_run.config.sources import read_sources
from megatron_run.errors import Findings, Problems


def read(*configs: object, **arguments: object) -> tuple[ConfigSource, list[str]]:
    findings, notices = Findings(), list[str]()
    layer = read_sources(Request(configs=configs or ({},), **arguments), findings, notices)  # type: ignore[arg-type]
    findings.settle()
    return layer, notices


def words(layer: ConfigSource, kind: str) -> list[str]:
    return [choice.reference for choice in layer.choices[kind]]


def test_files_then_environment_then_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train: {seed: 1, lr: 1, steps: 1, clip_norm: 1}\n")
    (tmp_path / "b.json").write_text('{"train": {"seed": 2, "lr": 2, "steps": 2}}')
    layer, _ = read(
        str(tmp_path / "a.yaml"),
        str(tmp_path / "b.json"),
        environment={"MEGATRON_RUN_SET": "train.lr=3; train.seed=3"},
        sets=("train.seed=4",),
    )
    found = {".".join(key): (str(value.data), str(value.origin)) for key, value in layer.values.items()}
    assert found == {
        "train.clip_norm": ("1", f"{tmp_path}/a.yaml line 1 column 35"),
        "train.steps": ("2", f"{tmp_path}/b.json line 1 column 32"),
        "train.lr": ("3", "environment MEGATRON_RUN_SET"),
        "train.seed": ("4", "--set train.seed"),
    }


def test_lists_and_scalars_replace_and_mappings_merge() -> None:
    layer, _ = read(
        {"data": {"use": "text", "paths": ["a", "b"]}, "train": {"ramp_up": {"start": 1, "increment": 1}}},
        {"data": {"paths": ["c"]}, "train": {"ramp_up": {"start": 2}}},
    )
    values = {key: value.data for key, value in layer.values.items()}
    assert values[("data", "paths")] == ["c"]
    assert values[("train", "ramp_up", "start")] == 2
    assert values[("train", "ramp_up", "increment")] == 1


def test_another_plugin_inherits_the_options_of_its_own_section_alone() -> None:
    chosen = {"optimizer": {"use": "zero1", "bucket_size": 5}, "train": {"lr": 1}}
    kept, _ = read(chosen, {"optimizer": "zero1"})
    changed, _ = read(chosen, {"optimizer": "adamw"})
    assert not any(value.inherited for value in kept.values.values())
    assert [key for key, value in changed.values.items() if value.inherited] == [("optimizer", "bucket_size")]


def test_null_covers_a_whole_mapping_and_back() -> None:
    ramp = {"train": {"ramp_up": {"start": 1}}}
    off = {"train": {"ramp_up": None}}
    assert {key: value.data for key, value in read(ramp, off)[0].values.items()} == {("train", "ramp_up"): None}
    assert list(read(off, ramp)[0].values) == [("train", "ramp_up", "start")]


def test_a_stronger_layer_trades_steps_for_samples() -> None:
    layer, _ = read({"train": {"steps": 3}}, sets=("train.samples=9",))
    assert list(layer.values) == [("train", "samples")]
    layer, _ = read({"train": {"steps": 3, "samples": None}})
    assert len(layer.values) == 2


def test_a_section_of_a_kind_has_one_meaning_in_both_spellings() -> None:
    assert words(read({"parallel-layer": "tensor+mine"})[0], "parallel-layer") == ["tensor", "mine"]
    assert words(read({"parallel_layer": {"use": ["tensor", "mine"]}})[0], "parallel-layer") == ["tensor", "mine"]
    assert words(read(sets=("parallel_layer=tensor",))[0], "parallel-layer") == ["tensor"]


def test_plugin_options_of_the_command_line() -> None:
    layer, _ = read(plugins=("graph-capture=partial,scope=attn,moe_router,strict=true",))
    assert words(layer, "graph-capture") == ["partial"]
    options = {key[1]: value.data for key, value in layer.values.items()}
    assert options == {"scope": "attn,moe_router", "strict": "true"}


def test_observers_are_added_and_set_replaces_them() -> None:
    layer, _ = read(plugins=("observer=trace,steps=3", "observer=console"))
    assert words(layer, "observer") == ["console", "jsonl", "tensorboard", "trace"]
    assert layer.choices["observer"][0].origin.source == "command line"
    assert layer.choices["observer"][1].origin.source == "default"
    assert list(layer.values) == [("observer", "trace", "steps")]
    layer, _ = read(
        {"observer": ["jsonl"]},
        environment={"MEGATRON_RUN_PLUGIN_OBSERVER": "trace"},
        sets=("observer.use=console",),
        plugins=("observer=tensorboard",),
    )
    assert words(layer, "observer") == ["console", "tensorboard"]
    assert words(read({"observer": []})[0], "observer") == []


@pytest.mark.parametrize("word", ["acme-zigzag:mine", "./mine.py", "../other/mine.py"])
def test_a_name_may_be_a_distribution_or_a_file(word: str) -> None:
    layer, _ = read(plugins=(f"schedule={word},group=2",))
    assert words(layer, "schedule") == [word]
    assert layer.choices["schedule"][0].origin == Origin("command line", f"--plugin schedule={word},group=2")


def test_an_environment_variable_without_meaning_is_a_notice() -> None:
    layer, notices = read(
        environment={
            "MEGATRON_RUN_PLUGIN_GRAPH_CAPTURE": "partial,scope=attn",
            "MEGATRON_RUN_PLUGIN_SHEDULE": "1f1b",
            "MEGATRON_RUN_SET": "",
        }
    )
    assert words(layer, "graph-capture") == ["partial"]
    assert words(layer, "schedule") == ["sequential"]
    assert notices == [
        (
            "the environment variable MEGATRON_RUN_PLUGIN_SHEDULE means nothing here; "
            "did you mean 'MEGATRON_RUN_PLUGIN_SCHEDULE'?"
        )
    ]


def test_standard_input_is_a_configuration() -> None:
    layer, _ = read("-", stdin="train: {lr: 1}\n")
    assert str(layer.values["train", "lr"].origin) == "standard input line 1 column 9"
    with pytest.raises(Problems, match="standard input, which was not read"):
        read("-")


def test_no_configuration_is_the_laptop_preset() -> None:
    layer = read_sources(Request(), Findings(), [])
    assert str(layer.values["train", "steps"].origin).startswith("preset:laptop line ")

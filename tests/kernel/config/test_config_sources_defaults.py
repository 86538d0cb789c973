"""What is chosen where nobody chooses a plugin, and how it is said."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_run.config.sources import DEFAULT_PLUGINS, RULES
from megatron_run.contracts import RUN_KINDS
from megatron_run.errors import ExitCode
from megatron_run.planning import resolver, to_yaml
from megatron_run.registry.discover import Catalog, scan
from megatron_run_cli.reports.config_report import show, show_json
from megatron_run_cli.reports.keys import explain
from tests.support.resolving import TINY, mistake, resolved


@pytest.mark.parametrize(
    ("sets", "name", "origin"),
    [
        ([], "none", "default"),
        (["train.precision=bf16"], "none", "default"),
        (["train.precision=fp16"], "dynamic", "the default with train.precision=fp16"),
        (["scaler.loss_scale=1024"], "constant", "the default with scaler.loss_scale"),
        (["scaler.loss_scale=1024", "train.precision=fp16"], "constant", "the default with scaler.loss_scale"),
        (["scaler=dynamic"], "dynamic", "--set scaler"),
        (["scaler=constant", "scaler.loss_scale=8", "train.precision=fp16"], "constant", "--set scaler"),
    ],
)
def test_the_default_scaler_follows_from_what_was_said(sets: list[str], name: str, origin: str) -> None:
    run = resolved(sets=sets)
    assert (run.config.scaler.use, run.one("scaler").name, run.one("scaler").origin) == (name, name, origin)
    assert show_json(run)["scaler.use"] | {"layer": ""} == {"value": name, "origin": origin, "layer": ""}
    ours = [notice for notice in run.notices if "the default with" in notice]
    assert ours == ([f"scaler={name} is {origin}"] if origin.startswith("the default") else [])


@pytest.mark.parametrize(
    "configs",
    [
        (TINY, {"train": {"precision": "fp16"}, "scaler": {"loss_scale_window": 500}}),
        (TINY, {"scaler": {"loss_scale_window": 500}}, {"train": {"precision": "fp16"}}),
    ],
)
def test_options_of_the_plugin_that_follows_are_its_own(configs: tuple[Any, ...]) -> None:
    assert resolved(*configs).config.scaler.options["loss_scale_window"] == 500


def test_a_file_decides_as_the_command_line_does_and_resolves_to_itself(tmp_path: Any) -> None:
    run = resolved(TINY, {"train": {"precision": "fp16"}})
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(run))
    again = resolved(str(file))
    assert again.config == run.config
    assert again.one("scaler").origin.startswith(f"{file} line ")


def test_the_choice_is_shown_with_its_reason() -> None:
    run = resolved(sets=["train.precision=fp16"])
    (line,) = (line for line in show(run).splitlines() if line.startswith("  use: dynamic "))
    assert line.endswith("# the default with train.precision=fp16")
    assert explain("scaler.use", run).splitlines() == [
        "scaler.use",
        "  type       name of a plugin",
        "  default    none; constant with scaler.loss_scale; dynamic with train.precision=fp16",
        "  meaning    NAME, DIST:NAME or a file ./mine.py",
        "  here       dynamic (from the default with train.precision=fp16)",
    ]


def test_defaults_that_follow_are_plugins_of_ours() -> None:
    installed = {(entry.kind, entry.name) for entry in scan().entries}
    assert {(kind, rule.plugin) for kind, rules in RULES.items() for rule in rules} <= installed
    assert {(kind, word) for kind, words in DEFAULT_PLUGINS.items() for word in words} <= installed
    assert {kind for kind in RUN_KINDS if kind not in DEFAULT_PLUGINS} == {"data"}


def test_a_default_that_follows_and_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Catalog(tuple(entry for entry in scan().entries if entry.kind != "scaler" or entry.builtin))
    monkeypatch.setattr(resolver, "scan", lambda: bare)
    assert mistake(sets=["train.precision=fp16"]) == (
        (
            "no installed plugin is scaler=dynamic (from the default with train.precision=fp16); "
            "pip install -e ./plugins/scaler/dynamic; installed: none"
        ),
        ExitCode.PLUGIN,
    )
    assert resolved(sets=["train.precision=bf16"]).one("scaler").name == "none"


def test_a_plugin_object_wins_over_a_default_that_follows() -> None:
    from megatron_run_engine.builtin.scaler import none

    run = resolved(plugins=[none], sets=["train.precision=bf16", "train.lr=1e-3"])
    assert run.one("scaler").name == "none"
    line, code = mistake(plugins=[none], sets=["train.precision=fp16"])
    assert line.startswith("train.precision=fp16 needs a plugin that serves it: scaler=none does not")
    assert code == ExitCode.INPUT

"""``config show``, ``config explain`` and ``config schema``."""

from __future__ import annotations

import pytest

from megatron_run.errors import InputError
from megatron_run_cli.reports.config_report import json_schema, show, show_json
from megatron_run_cli.reports.keys import explain, installed_plugins
from tests.support.resolving import resolved


def test_show_gives_every_key_its_origin() -> None:
    run = resolved(sets=["train.seed=7"], plugins=["schedule=interleaved", "optimizer=adamw,eps=1e-6"])
    lines = {line.split(":")[0].strip(): line for line in show(run).splitlines()}
    assert lines["seed"].split("# ")[1] == "--set train.seed"
    assert lines["pipeline"].split("# ")[1] == "the suggestion of schedule=interleaved"
    assert lines["eps"].split("# ")[1] == "--plugin optimizer=adamw,eps=1e-6"
    assert lines["betas"].split("# ")[1] == "default"
    assert show_json(run)["train.steps"] == {
        "value": 20,
        "origin": "preset:tiny line 10 column 3",
        "layer": "file",
    }


def test_explain_says_what_a_key_means_and_where_its_value_is_from() -> None:
    run = resolved(sets=["train.lr=0.5"])
    assert explain("train.lr", run).splitlines() == [
        "train.lr",
        "  type       number, above 0",
        "  default    0.00015",
        "  meaning    peak learning rate",
        "  here       0.5 (from --set train.lr)",
    ]
    assert "option of  model=gpt" in explain("model.num_layers", run)
    assert explain("parallel-layer.use") == explain("parallel_layer.use")
    assert "train.ramp_up.start" in explain("train")
    with pytest.raises(InputError, match=r"did you mean 'train\.lr'"):
        explain("train.lrr", run)


def test_the_schema_knows_every_key_that_a_run_has() -> None:
    described = json_schema(installed_plugins().plugins)
    for key in show_json(resolved()):
        part = described
        for name in key.split("."):
            branches = [part, *part.get("anyOf", ())]
            branches = [
                described["$defs"][each["$ref"].rpartition("/")[2]] if "$ref" in each else each for each in branches
            ]
            (part,) = [each["properties"][name] for each in branches if name in each.get("properties", {})]

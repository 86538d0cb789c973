"""``config show``, ``config explain`` and ``config schema``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    assert show_json(run)["optimizer.eps"]["origin"] == "--plugin optimizer=adamw,eps=1e-6"
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
        "  changes    a resumed run needs --allow-change train.lr",
        "  here       0.5 (from --set train.lr)",
    ]
    assert "option of  model=gpt" in explain("model.num_layers", run)
    assert explain("parallel-layer.use") == explain("parallel_layer.use")
    assert "train.ramp_up.start" in explain("train")
    with pytest.raises(InputError, match=r"did you mean 'train\.lr'"):
        explain("train.lrr", run)


def test_the_schema_knows_every_key_that_a_run_has() -> None:
    described = json_schema(installed_plugins().plugins)

    def branches(part: Any) -> Iterator[Any]:
        whole = described["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        yield whole
        for each in whole.get("anyOf", ()):
            yield from branches(each)

    for key in show_json(resolved()):
        parts: list[Any] = [described]
        for name in key.split("."):
            inside = [each.get("properties", {}) for part in parts for each in branches(part)]
            parts = [each[name] for each in inside if name in each]
        assert parts, key


def test_a_key_of_a_group_has_an_origin_of_its_own() -> None:
    run = resolved(sets=["model.ffn_size=40", "model.experts.count=4", "model.experts.router.groups=2"])
    found = show_json(run)
    assert found["model.experts.router.groups"]["origin"] == "--set model.experts.router.groups"
    assert (found["model.ffn_size"]["layer"], found["model.experts.ffn_size"]["layer"]) == ("command line", "default")
    shown = show(run)
    assert "  experts:\n" in shown
    assert "    router:\n" in shown


def test_explain_says_what_a_change_of_a_key_means() -> None:
    keys = ("model.rope.theta", "model.loss_chunks", "model.hidden_size", "parallel.pipeline")
    rows = {key: explain(key) for key in (*keys, "train.sequence_length", "train.lr", "train.steps")}
    assert (
        "  changes    may differ for the same weights; a resumed run needs --allow-change" in rows["model.rope.theta"]
    )
    assert "  changes    may change between attempts, which learn the same" in rows["model.loss_chunks"]
    assert "  changes    never changes within a run" in rows["train.sequence_length"]
    assert "  changes    never changes within a run" in rows["model.hidden_size"]
    assert "  changes    a resumed run needs --allow-change train.lr" in rows["train.lr"]
    assert "  changes    a longer run needs --extend, a shorter one --allow-change train.steps" in rows["train.steps"]
    assert "  changes    may change between attempts" in rows["parallel.pipeline"]
    assert explain("model.experts.router").count("\n\n") >= 7, "each key of a group"
    with pytest.raises(InputError, match=r"type model\.rope\.theta"):
        explain("theta")


def test_the_schema_keeps_groups_of_the_same_name_apart() -> None:
    schema = json_schema(installed_plugins().plugins)
    norms = {name: each["properties"].keys() for name, each in schema["$defs"].items() if name.endswith("NormOptions")}
    assert norms["model=t5.NormOptions"] == {"eps"}
    assert norms["model=bert.NormOptions"] == {"eps", "order"}
    assert norms["model=gpt.NormOptions"] == {"eps", "kind", "placement"}
    (said,) = (each for each in schema["properties"]["model"]["anyOf"] if "properties" in each)
    assert "theta" in schema["$defs"]["model=gpt.RopeOptions"]["properties"]
    assert "$ref" in str(said["properties"]["rope"])

"""``schedule show``: text, JSON, pictures and exit codes, and all of it without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron_run_cli.main import main
from tests.support.checkout import ROOT

Output = pytest.CaptureFixture[str]

SHOW = ("schedule", "show")
SHAPE = ("--stages", "4", "--chunks", "2", "--microbatches", "8")
INTERLEAVED = (*SHOW, "--plugin", "schedule=interleaved", *SHAPE)
GOLDEN = ROOT / "tests/cli/reports/interleaved_4_2_8.json"

STUCK = """
from megatron_run import Action, PluginInfo, hookimpl
from megatron_run.contracts import Schedule

class Stuck(Schedule):
    def actions(self, spec):
        return [[Action("B", 0, 0), Action("F", 0, 0)] for _ in range(spec.stages)]

@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("schedule", "stuck", provides=frozenset({"parallel.pipeline"}))

@hookimpl
def megatron_run_create_schedule(options):
    return Stuck()
"""


def as_json(capsys: Output, *words: str, code: int = 0) -> Any:
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def told(capsys: Output, *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def refused(capsys: Output, code: int, *words: str) -> str:
    assert main(words) == code
    said = capsys.readouterr()
    assert not said.out
    return said.err


def test_the_text_draws_the_step(capsys: Output) -> None:
    lines = told(capsys, *INTERLEAVED).splitlines()
    assert lines[0] == "schedule=interleaved: a step of 8 microbatches on 4 stages x 2 chunks"
    assert "bubble 15.8%" in lines[1]
    assert "in flight at most 11, 9, 7, 5" in lines[2]
    assert lines[4].startswith("stage 0 |01230123456...aa7bb.4")


def test_the_json_is_the_stable_form(capsys: Output) -> None:
    assert as_json(capsys, *INTERLEAVED) == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_files_are_written_and_named(tmp_path: Path, capsys: Output) -> None:
    svg, trace = tmp_path / "step.svg", tmp_path / "step.json"
    out = told(capsys, *INTERLEAVED, "--svg", str(svg), "--trace", str(trace))
    assert out.endswith(f"written: {svg}\nwritten: {trace}\n")
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]


def test_the_picture_of_the_guide_is_the_one_that_is_drawn(tmp_path: Path, capsys: Output) -> None:
    told(capsys, *INTERLEAVED, "--svg", str(tmp_path / "step.svg"))
    shown = ROOT / "docs/images/schedule-interleaved.svg"
    assert (tmp_path / "step.svg").read_text(encoding="utf-8") == shown.read_text(encoding="utf-8")


def test_it_loads_no_torch_even_for_a_configuration(tmp_path: Path) -> None:
    words = [
        *SHOW,
        "preset:tiny",
        "--plugin",
        "schedule=1f1b",
        "--svg",
        str(tmp_path / "a"),
        "--trace",
        str(tmp_path / "b"),
    ]
    code = (
        f"import sys; from megatron_run_cli.main import main; assert main({words!r}) == 0; "
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_configuration_shows_what_the_bare_command_runs(capsys: Output) -> None:
    shown = as_json(capsys, *SHOW, "--plugin", "schedule=interleaved")
    planned = as_json(capsys, "--plugin", "schedule=interleaved", "--dry-run")
    assert [rank["layers"] for rank in shown["ranks"]] == [rank["layers"] for rank in planned["topology"]["ranks"]]
    assert shown["microbatches"] == planned["plans"][0]["microbatches"]
    assert shown["bubble_fraction"] == planned["plans"][0]["bubble"]


def test_a_configuration_gives_what_no_option_says(tmp_path: Path, capsys: Output) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(
        "model: {num_layers: 6, hidden_size: 8, num_heads: 1}\n"
        "train: {steps: 1, micro_batch_size: 2, global_batch_size: 24}\n"
        "parallel: {pipeline: 3, data: 2}\nschedule: 1f1b\ndata: mock\n"
    )
    shown = as_json(capsys, *SHOW, str(config))
    assert (shown["stages"], shown["chunks"], shown["microbatches"]) == (3, 1, 6)
    assert shown["ranks"][2]["layers"] == [[4, 5]]
    shown = as_json(capsys, *SHOW, str(config), "--stages", "2", "--microbatches", "5")
    assert (shown["stages"], shown["microbatches"], shown["ranks"][1]["layers"]) == (2, 5, [[3, 4, 5]])


def test_a_ramp_up_shows_its_largest_step(capsys: Output) -> None:
    ramp = [f"--set=train.ramp_up.{key}" for key in ("start=4", "increment=4", "samples=64")]
    shown = as_json(
        capsys, *SHOW, "--plugin", "schedule=1f1b", "--stages", "2", "--set", "train.global_batch_size=32", *ramp
    )
    assert shown["microbatches"] == 8


def test_layers_are_one_a_place_unless_somebody_says(capsys: Output) -> None:
    words = (*SHOW, "--plugin", "schedule=1f1b", "--stages", "3")
    layers = [rank["layers"] for rank in as_json(capsys, *words)["ranks"]]
    assert layers == [[[0]], [[1]], [[2]]]
    for more in (("--layers", "6"), ("--set", "model.num_layers=6")):
        assert as_json(capsys, *words, *more)["ranks"][0]["layers"] == [[0, 1]]
    counts = as_json(capsys, *words, "--set", "parallel.layers=2,0,1")
    assert [rank["layers"] for rank in counts["ranks"]] == [[[0, 1]], [[]], [[2]]]


def test_uneven_splits_are_shown_as_a_run_would_have_them(capsys: Output) -> None:
    def split(*sets: str) -> list[list[list[int]]]:
        return [
            rank["layers"] for rank in as_json(capsys, *words, *(f"--set=parallel.{each}" for each in sets))["ranks"]
        ]

    words = (*SHOW, "--plugin", "schedule=1f1b", "--stages", "3")
    assert split("first_stage_layers=2") == [[[0, 1]], [[2]], [[3]]]
    assert split("embedding_as_layer=true", "loss_as_layer=true") == [[[]], [[0]], [[]]]
    words = (*SHOW, "--plugin", "schedule=zero-bubble,variant=v", "--layers", "8")
    assert split("last_stage_layers=2") == [[[0, 1, 2], [5, 6, 7]], [[3], [4]]]
    assert "exclude each other" in refused(
        capsys, 2, *words, "--set", "parallel.layers=8,0,0,0", "--set", "parallel.loss_as_layer=true"
    )


def test_layers_that_do_not_divide_are_an_error_with_its_origin(capsys: Output) -> None:
    said = refused(capsys, 2, *SHOW, "--plugin", "schedule=1f1b", "--stages", "3", "--layers", "4")
    assert "4 layers do not divide over 3 stages" in said


def test_a_refused_shape_is_an_error_of_the_user(capsys: Output) -> None:
    said = refused(capsys, 2, *INTERLEAVED[:-1], "6")
    assert "interleaved cannot run 6 microbatches" in said
    assert "(from --microbatches 6); " in said


def test_a_schedule_that_serves_no_stages_is_refused(capsys: Output) -> None:
    said = refused(capsys, 2, *SHOW, "--stages", "2")
    assert "parallel.pipeline=2 needs a plugin that serves it" in said


def test_sizes_are_at_least_one(capsys: Output) -> None:
    assert "--stages" in refused(capsys, 2, *SHOW, "--stages", "0")


def test_a_schedule_that_is_not_installed_is_a_plugin_error(capsys: Output) -> None:
    assert "interleved" in refused(capsys, 3, *SHOW, "--plugin", "schedule=interleved")


def test_an_invalid_schedule_is_said_with_its_fault(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    words = (*SHOW, "--plugin", f"schedule={tmp_path / 'stuck.py'}", "--stages", "2", "--microbatches", "1")
    said = refused(capsys, 3, *words)
    assert "stage 0, action 0: B0.0 is too early" in said
    record = as_json(capsys, *words, code=3)
    assert record.pop("fault") in said
    assert record == {"stages": 2, "chunks": 1, "microbatches": 1, "valid": False}


def test_several_mistakes_are_said_at_once(capsys: Output) -> None:
    said = refused(capsys, 2, *SHOW, "--set", "parallel.pipelin=2", "--plugin", "schedule=1f1b,group=2")
    assert "did you mean 'pipeline'?" in said
    assert "schedule.group" in said

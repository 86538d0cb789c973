"""``megatron-run plan``: text, JSON, files and refusals, and all of it without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_run.errors import ExitCode
from megatron_run.errors.install_hint import how_to_install
from megatron_run.planning import load_config
from megatron_run.registry.discover import Catalog, scan
from megatron_run_cli.main import main
from megatron_run_planner.devices import read_device
from megatron_run_planner.schedules import installed
from tests.planner.surveyed import TRUE, surveyed
from tests.planner.surveyed_gpu import StandIn
from tests.support.checkout import ROOT

Output = pytest.CaptureFixture[str]

TABLE = str(ROOT / "tests/planner/tables/a100_multi.csv")
CHECK = ("plan", "check", TABLE, "--device", "a100")


def test_the_summary_and_the_worst_ten_are_shown(capsys: Output) -> None:
    assert main(CHECK) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("62 rows")
    errors = [abs(float(line.split()[-1].rstrip("%"))) for line in lines[lines.index("") + 3 :]]
    assert len(errors) == 10
    assert errors == sorted(errors, reverse=True)


def test_every_row_is_listed_when_asked(capsys: Output) -> None:
    assert main([*CHECK, "--rows"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 62 + 8


def test_json_holds_fractions_and_rows(capsys: Output) -> None:
    assert main([*CHECK, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in told["rows"]]
    assert told["mean_error"] == pytest.approx(sum(errors) / 62)
    assert 0 < told["regret_mean"] <= told["regret_max"] < 1
    assert -1 <= told["kendall"] <= 1


def test_recomputation_can_be_said(capsys: Output) -> None:
    assert main([*CHECK, "--json", "--recompute", "none"]) == 0
    none = json.loads(capsys.readouterr().out)
    assert {row["split"]["recompute"] for row in none["rows"]} == {"none"}
    assert none["mean_error"] > 0.15


def test_the_best_ten_are_ranked_with_what_limits_them(capsys: Output) -> None:
    assert main(["plan", "--size", "1.3B", "--gpus", "8", "--device", "a100-40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = lines[3:13]
    seconds = [float(row.split()[0].rstrip("s")) for row in rows]
    assert seconds == sorted(seconds)
    assert all("; " in row for row in rows)
    assert any(line.startswith("best: ") for line in lines)
    assert any(line.startswith("next: add --write best.yaml, then megatron-run best.yaml --dry-run") for line in lines)


def test_a_model_may_not_fit(capsys: Output) -> None:
    assert main(["plan", "--size", "175B", "--gpus", "8", "--device", "a100-40"]) == 2
    said = capsys.readouterr().err
    assert "GiB of 40" in said
    assert len(said.splitlines()) == 1


def test_less_memory_leaves_slower_splits(capsys: Output) -> None:
    best = []
    for memory in ("40GiB", "12GiB"):
        assert main(["plan", "--size", "1.3B", "--gpus", "8", "--memory", memory, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert all(each["memory_needed"] <= float(memory[:2]) * 2**30 for each in told["best"])
        best.append(told["best"][0]["seconds"])
    assert best[0] < best[1]


def test_the_best_is_written_and_can_be_asked_about(capsys: Output, tmp_path: Path) -> None:
    file = tmp_path / "best.yaml"
    assert main(["plan", "--size", "1.3B", "--gpus", "8", "--write", str(file)]) == 0
    told = capsys.readouterr().out
    assert f"next: megatron-run {file} --dry-run, and megatron-run {file} --nproc 8" in told
    assert f"written: {file}; its data are generated (data=mock): name yours in it" in told
    other = tmp_path / "text.yaml"
    assert main(["plan", str(file), "--set", "data.use=text", "--gpus", "8", "--write", str(other)]) == 0
    assert capsys.readouterr().out.endswith(f"written: {other}\n")
    assert main(["plan", str(file), "--gpus", "8", "--what-if", "train.micro_batch_size=1", "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)["candidates"]
    assert one["seconds"] == pytest.approx(float(told.splitlines()[3].split()[0].rstrip("s")), abs=1e-3)
    assert two["split"]["micro_batch"] == 1
    assert two["seconds"] != one["seconds"]


@pytest.mark.parametrize(
    ("asked", "tensor", "layers"),
    [(("--as-is",), 2, (4, 3, 3, 2)), (("--as-is", "--what-if", "parallel.tensor=4"), 4, (4, 3, 3, 2))],
)
def test_the_split_that_was_asked_about_is_written(
    capsys: Output, tmp_path: Path, asked: tuple[str, ...], tensor: int, layers: tuple[int, ...]
) -> None:
    file = tmp_path / "asked.yaml"
    sizes = {"num_layers": 12, "hidden_size": 512, "num_heads": 8, "vocab_size": 1024}
    shape = [f"model.{key}={value}" for key, value in sizes.items()]
    shape += ["parallel.tensor=2", "parallel.pipeline=4", f"parallel.layers={','.join(map(str, layers))}"]
    words = ["plan", "preset:tiny", *(word for each in shape for word in ("--set", each)), *asked, "--write", str(file)]
    assert main(words) == 0
    assert f"written: {file}" in capsys.readouterr().out.splitlines()[-1]
    assert main([*words, "--json", "--overwrite"]) == 0
    split = json.loads(capsys.readouterr().out)["candidates"][-1]["split"]
    assert (split["tensor"], split["layers"]) == (tensor, list(layers))
    parallel = load_config(file, environment={}).config.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.layers) == (tensor, 4, layers)


def test_uneven_layers_are_told_where_they_must_be_typed(capsys: Output) -> None:
    """40 layers over 4 stages are even; at 14 places two hold a layer less."""
    words = ["plan", "--size", "13B", "--set", "train.global_batch_size=128", "--gpus", "8", "--device", "a100-40"]
    assert main([*words, "--json"]) == 0
    splits = [each["split"] for each in json.loads(capsys.readouterr().out)["best"]]
    assert {sum(each["layers"]) for each in splits if 40 % (each["pipeline"] * each["chunks"])} == {40}
    assert not any(each["layers"] for each in splits if not 40 % (each["pipeline"] * each["chunks"]))
    assert any(each["layers"] for each in splits)
    assert main(words) == 0
    (best,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("best: "))
    assert "parallel.sequence=true" in best.split()
    assert best.endswith(" parallel-layer=tensor")
    uneven = ["parallel.tensor=4", "parallel.pipeline=2", "parallel.chunks=7", "train.micro_batch_size=2"]
    assert main([*words, "--as-is", *(word for each in uneven for word in ("--set", each))]) == 0
    note = capsys.readouterr().out.splitlines()[-1]
    assert f" parallel.layers={'3,' * 12}2,2 " in note


def test_what_the_best_needs_and_is_not_installed_is_named(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scan()
    left = Catalog(tuple(each for each in found.entries if each.name not in ("zero1", "tensor", "gpt", "adamw")))
    monkeypatch.setattr(installed, "scan", lambda: left)
    words = ["plan", "--size", "20B", "--gpus", "32", "--device", "a100-40"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["best"][0]["split"]["optimizer"] == "zero1"
    assert told["best"][0]["split"]["tensor"] > 1
    missing = ("megatron-run-engine", "megatron-run-optimizer-zero1", "megatron-run-parallel-layer-tensor")
    assert sorted(told["install"]) == sorted(map(how_to_install, missing))
    assert main(words) == 0
    (line,) = (each for each in capsys.readouterr().out.splitlines() if each.startswith("next: "))
    assert line.startswith(f"next: {', then '.join(told['install'])}, then add --write best.yaml, then megatron-run")


@pytest.mark.parametrize(
    ("steps", "unit", "seconds"),
    [(10, "seconds", 1), (3000, "minutes", 60), (10**5, "hours", 3600), (10**6, "days", 86400)],
)
def test_the_length_of_a_run_is_told_in_a_unit_that_fits(capsys: Output, steps: int, unit: str, seconds: int) -> None:
    words = [
        "plan",
        "preset:gpt2-355m",
        "--as-is",
        "--gpus",
        "64",
        "--device",
        "a100",
        "--set",
        f"train.steps={steps}",
    ]
    assert main([*words, "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["candidates"][0]["seconds"]
    assert main(words) == 0
    assert f" tokens in {step * steps / seconds:,.2f} {unit}, " in capsys.readouterr().out


def test_a_what_if_takes_the_place_of_what_the_command_line_set(capsys: Output) -> None:
    words = ["plan", "--size", "2.7B", "--gpus", "8", "--set", "parallel.tensor=2", "--what-if", "parallel.tensor=4"]
    assert main([*words, "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)["candidates"]
    assert (one["split"]["tensor"], two["split"]["tensor"]) == (2, 4)
    assert main([*words, "--device", "a100-40"]) == 0
    assert capsys.readouterr().out.startswith("2.7B parameters on 8 x A100 40 GB, batch ")


@pytest.mark.parametrize(("more", "told"), [((), True), (("--gpus", "8"), False)])
def test_a_what_if_on_more_devices_says_so(capsys: Output, more: tuple[str, ...], told: bool) -> None:
    words = ["plan", "--size", "2.7B", "--set", "parallel.data=4", "--set", "parallel.tensor=2"]
    assert main([*words, *more, "--what-if", "parallel.tensor=4"]) == 0
    assert ("on 16 devices, not 8" in capsys.readouterr().out) is told


def test_a_searched_schedule_is_written_and_proven(capsys: Output, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    stages = ("--set", "parallel.pipeline=4", "--set", "parallel.chunks=2", "--set", "train.global_batch_size=4")
    assert (
        main(
            [
                "plan",
                "schedule",
                "--size",
                "350M",
                "--gpus",
                "4",
                *stages,
                "--effort",
                "0.02",
                "--write",
                str(file),
                "--json",
            ]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["searched"]["seconds"] < min(each["seconds"] for each in told["installed"])
    layers = sum(count for _, _, count in told["places"])
    words = [
        "schedule",
        "show",
        "--plugin",
        f"schedule={file}",
        "--microbatches",
        "4",
        "--layers",
        str(layers),
        "--json",
    ]
    assert main(words) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert len(ranks) == 4
    assert main(["plugins", "check", str(file)]) == 0


SPLIT = ("--set", "parallel.pipeline=2", "--set", "parallel.chunks=2", "--plugin", "schedule=interleaved")


def test_a_predicted_step_lasts_as_long_as_it_says(capsys: Output, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    words = ["plan", "--size", "1.3B", *SPLIT, "--gpus", "2", "--as-is", "--timeline", str(file), "--json"]
    assert main(words) == 0
    (told,) = json.loads(capsys.readouterr().out)["candidates"]
    bars = [each for each in json.loads(file.read_text())["traceEvents"] if each["ph"] == "X"]
    last = max(bar["ts"] + bar["dur"] for bar in bars) / 1e6
    busy = sum(bar["dur"] for bar in bars) / 1e6
    assert busy == pytest.approx(2 * last * (1 - told["waiting"]))
    assert last < told["seconds"] < 1.5 * last
    for stage in (0, 1):
        mine = sorted((bar["ts"], bar["ts"] + bar["dur"]) for bar in bars if bar["tid"] == stage + 1)
        assert mine
        assert all(end <= start for (_, end), (start, _) in pairwise(mine))


def test_how_a_model_was_read_is_said(capsys: Output) -> None:
    text = ["--plugin", "data=text,paths=texts,tokenizer=mine.json"]
    assert main(["plan", "preset:tiny", "--gpus", "1", "--as-is", *text]) == 0
    assert "read as" in capsys.readouterr().out  # no vocabulary is given
    for known in ([], [*text, "--set", "model.vocab_size=128"]):
        assert main(["plan", "preset:tiny", "--gpus", "1", "--as-is", *known]) == 0
        assert "read as" not in capsys.readouterr().out
    windows = ["--set", "model.vocab_size=128", "--set", "model.attention.window=8"]
    assert main(["plan", "preset:tiny", "--gpus", "1", "--as-is", *windows, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reading"].startswith("full attention because")


def test_a_model_of_a_third_party_is_planned(capsys: Output) -> None:
    """It has no attention, and tells its costs as any other."""
    shape = ["num_layers=3", "hidden_size=64", "vocab_size=256"]
    words = [word for key in shape for word in ("--set", f"model.{key}")]
    chosen = ["--plugin", f"model={ROOT / 'tests/examples/plugins/model.py'}", *words]
    assert main(["preset:tiny", *chosen, "--dry-run", "--json"]) == 0
    parameters = json.loads(capsys.readouterr().out)["parameters"]
    assert main(["plan", "preset:tiny", *chosen, "--gpus", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not told["reading"]
    held = told["best"][0]["memory_by_stage"][0]["parameters"]
    assert held == pytest.approx(2 * parameters, rel=0.05)


def test_a_month_with_failures_yields_less_than_one_without(capsys: Output) -> None:
    useful = []
    for mtbf in ("1000h", "100000d"):
        assert (
            main(["plan", "goodput", "--size", "1.3B", "--gpus", "64", "--mtbf", mtbf, "--days", "30", "--json"]) == 0
        )
        useful.append(json.loads(capsys.readouterr().out)["useful"])
    assert useful[0] < useful[1] < 1


def test_a_slow_network_makes_longer_steps(capsys: Output) -> None:
    seconds = []
    for share in ("1", "0.1"):
        assert main(["plan", "goodput", "--size", "1.3B", "--gpus", "64", "--slow-link", share, "--json"]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["seconds"])
    assert seconds[0] < seconds[1]


def test_a_month_is_told_in_words(capsys: Output) -> None:
    given = ("--mtbf", "900h", "--stall", "20s", "--restart", "3min")
    assert main(["plan", "goodput", "--size", "1.3B", "--gpus", "8", "--interval", "1h", *given]) == 0
    told = capsys.readouterr().out
    assert "1.2B parameters on 8 x A100 80 GB" in told
    assert "a device fails every 900 h, a save stalls 20 s, a restart takes 3 min" in told
    assert "saves every 60.0 min" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "goodput", "--gpus", "8", "--mtbf", "long"), "length of time"),
        (("plan", "goodput", "--gpus", "8", "--days", "many"), "'many' is not a number."),
        (("plan", "--size", "13", "--gpus", "8"), "13B"),
        (("plan", "--size", "13B", "--gpus", "8", "--memory", "80"), "80GiB"),
        (("plan", "--gpus", "6", "--set", "parallel.tensor=4", "--what-if", "train.seed=1"), "multiple of 4"),
        (("plan", "schedule", "--size", "350M", "--gpus", "4"), "parallel.pipeline=4"),
        (("plan", "--size", "1.3B", "--gpus", "8", "--beside", "step.json"), "--timeline"),
        (("plan", "preset:tiny", "--gpus", "1", "--as-is", "--timeline", "x.json", "--beside", "x.csv"), "no trace"),
        (("plan", "check", "missing.csv", "--device", "a100"), "missing.csv"),
        (("plan", "check", TABLE, "--device", "a10"), "a100"),
        (("plan", "check", TABLE), "--device"),
        (
            ("plan", "--size", "125M", "--gpus", "1", "--write", "no/best.yaml"),
            "no/best.yaml cannot be written: No such",
        ),
    ],
)
def test_mistakes_are_refused_in_one_line(capsys: Output, words: tuple[str, ...], said: str) -> None:
    assert main(words) == 2
    told = capsys.readouterr()
    assert not told.out
    assert said in told.err
    assert len(told.err.splitlines()) == 1


def test_the_planner_loads_neither_torch_nor_numpy(tmp_path: Path) -> None:
    code = (
        "import sys; from megatron_run_cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ('torch' in sys.modules) * 3 or ('numpy' in sys.modules) * 4)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *CHECK], capture_output=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 0


def test_a_calibration_writes_a_device_that_plan_reads(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = asdict(replace(surveyed(TRUE), half_products=[(64, 64, 64, 1e-6)]))
    monkeypatch.setattr("megatron_run_engine.estimate.calibration.survey.survey", lambda say: measured)
    file = tmp_path / "here.yaml"
    assert main(["plan", "calibrate", "--device-name", "here", "--output", str(file)]) == 0
    assert "products   88 GFLOP/s, in bf16 524" in capsys.readouterr().out
    assert read_device(str(file)).name == "here"
    assert main(["plan", "preset:tiny", "--gpus", "2", "--device", str(file)]) == 0
    assert "2 x here" in capsys.readouterr().out
    assert main(["plan", "calibrate", "--output", str(tmp_path / "none" / "here.yaml")]) == ExitCode.INPUT


def test_a_calibration_of_a_gpu_writes_a_device_too(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = "megatron_run_engine.estimate.calibration.gpu_clock"
    monkeypatch.setattr(f"{module}.GpuClock", StandIn)
    file = tmp_path / "here.yaml"
    assert main(["plan", "calibrate", "--device", "cuda", "--output", str(file)]) == 0
    assert "TB/s" in capsys.readouterr().out
    assert read_device(str(file)).sweeps.counted
    assert main(["plan", "preset:tiny", "--gpus", "2", "--device", str(file)]) == 0
    assert "2 x stand-in" in capsys.readouterr().out


def test_a_gpu_that_is_not_there_is_not_measured(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = tmp_path / "here.yaml"
    assert main(["plan", "calibrate", "--device", "cuda", "--output", str(file)]) == ExitCode.INPUT
    assert "torch sees none" in capsys.readouterr().err
    assert not file.exists()

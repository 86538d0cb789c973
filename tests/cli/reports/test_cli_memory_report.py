"""A dry run with a device says whether each rank fits, draws its memory, and what to turn."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_run.planning import ResolvedRun, load_config
from megatron_run_cli.main import main
from megatron_run_cli.reports import dry_run
from megatron_run_cli.reports.dry_run import dry_run_json, dry_run_text
from megatron_run_cli.reports.memory_report import ROLES
from megatron_run_engine.estimate.model_size import model_size
from megatron_run_engine.estimate.step_memory import step_memory
from megatron_run_planner.devices import Device, read_device
from megatron_run_planner.memory import RESERVED, SLACK

Output = pytest.CaptureFixture[str]
MIB = 2**20
SETS = {
    "model.num_layers": 2,
    "model.hidden_size": 256,
    "model.num_heads": 8,
    "train.sequence_length": 256,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 32,
    "train.precision": "bf16",
    "parallel.data": 2,
}


def resolved(*plugins: str, **values: Any) -> ResolvedRun:
    return load_config("preset:tiny", sets={**SETS, **values}, plugins=plugins, environment={})


def device(memory: float) -> Device:
    return read_device("a100").model_copy(update={"memory": RESERVED + memory, "name": "small"})


@pytest.fixture(scope="module")
def two_stages() -> ResolvedRun:
    return resolved("schedule=1f1b")


@pytest.fixture(scope="module")
def counted(two_stages: ResolvedRun) -> list[dict[str, int]] | None:
    model_size(two_stages)  # what is counted was built once
    return step_memory(two_stages)


@pytest.fixture(autouse=True)
def counted_once(
    monkeypatch: pytest.MonkeyPatch, two_stages: ResolvedRun, counted: list[dict[str, int]] | None
) -> None:
    """To count takes a second, and every report of a run says the same."""
    monkeypatch.setattr(dry_run, "_step_memory", lambda run, device: counted if run is two_stages else step_memory(run))


def test_what_a_rank_needs_is_what_was_counted_and_the_reserve(
    two_stages: ResolvedRun, counted: list[dict[str, int]] | None
) -> None:
    told = dry_run_json(two_stages, device(2**30))["memory"]
    assert counted is not None
    for stage, size in enumerate(model_size(two_stages).stages):
        total = sum(size.memory.values()) + sum(counted[stage].values())
        assert told["needed_by_stage"][stage] == pytest.approx(total * (1 + SLACK) + RESERVED)
        assert sum(told["by_stage"][stage].values()) == pytest.approx(told["needed_by_stage"][stage])


def test_the_copy_of_an_asynchronous_save_takes_no_memory_of_the_device() -> None:
    plain, saving = (
        dry_run_json(resolved(**{"checkpoint.async_save": on}), device(2**30))["memory"]["needed_by_stage"]
        for on in (False, True)
    )
    assert plain == saving


def test_one_byte_decides_whether_it_fits(two_stages: ResolvedRun) -> None:
    needed = max(dry_run_json(two_stages, device(2**40))["memory"]["needed_by_stage"])
    for less, fits in ((0, True), (1, False)):
        told = dry_run_json(two_stages, device(needed - RESERVED - less))["memory"]
        assert told["fits"] is fits
        assert bool(told["remedies"]) is not fits


def test_a_remedy_that_is_enough_is_named_first_and_taking_it_is_enough() -> None:
    run = resolved()
    told = dry_run_json(run, device(2**40))["memory"]
    small = device(told["needed_by_stage"][0] - RESERVED - 2 * MIB)
    first = dry_run_json(run, small)["memory"]["remedies"][0]
    assert first["needed"] <= small.memory
    plugins = [each for each in first["settings"] if not each.startswith(("parallel.", "train."))]
    values = dict(each.split("=") for each in first["settings"] if each not in plugins)
    then = dry_run_json(resolved(*plugins, **values), small)["memory"]
    assert then["fits"]
    assert max(then["needed_by_stage"]) == pytest.approx(first["needed"], rel=0.02)


def test_bars_are_as_long_as_what_they_stand_for(two_stages: ResolvedRun) -> None:
    """80 columns for the larger of the device and the fullest stage; a bar of the limit where the device ends."""
    told = dry_run_json(two_stages, device(10 * MIB))["memory"]
    needed, memory = told["needed_by_stage"], told["memory"]
    column = max(*needed, memory) / 80
    bars = re.findall(r"^stage \d \|([a-z ]*)\|([a-z]*) ", dry_run_text(two_stages, device(10 * MIB)), re.M)
    assert len(bars) == 2
    for (inside, beyond), held, total in zip(bars, told["by_stage"], needed, strict=True):
        bar = (inside + beyond).rstrip()
        assert len(bar) == pytest.approx(total / column, abs=1)
        assert len(inside) == round(memory / column)
        for role, size in held.items():
            assert bar.count(ROLES[role][0]) == pytest.approx(size / column, abs=1.01)


def test_without_a_device_bars_are_drawn_and_nothing_is_judged(two_stages: ResolvedRun) -> None:
    told = dry_run_json(two_stages)["memory"]
    assert "fits" not in told
    assert all("reserve" not in held for held in told["by_stage"])
    assert "fit small" not in dry_run_text(two_stages)
    assert "\nmemory of a rank, as on a CPU; --device NAME: as on that device\n" in dry_run_text(two_stages)
    assert re.search(r"^stage 0 \|p+g+", dry_run_text(two_stages), re.M)


def test_the_drawing_has_a_box_for_each_role_of_each_stage(tmp_path: Path, two_stages: ResolvedRun) -> None:
    file = tmp_path / "memory.svg"
    held = dry_run_json(two_stages, device(2**30), file)["memory"]["by_stage"]
    widths = {role: [stage[role] for stage in held] for role in held[0]}
    text = file.read_text(encoding="utf-8")
    for role, sizes in widths.items():
        found = [float(each) for each in re.findall(rf'class="{role}" [^>]*width="([\d.]+)"', text)]
        assert len(found) == 2
        assert found[0] / max(found[1], 1e-9) == pytest.approx(sizes[0] / sizes[1], rel=0.1)
    assert 'class="limit"' in text


def test_a_model_that_the_planner_does_not_know_is_still_judged() -> None:
    run = resolved(**{"model.experts.count": 4})
    told = dry_run_json(run, device(MIB))["memory"]
    assert not told["fits"]
    assert told["needed_by_stage"][0] > RESERVED + MIB


def test_the_command_reports_and_refuses_nothing(tmp_path: Path, capsys: Output) -> None:
    """A device too small is an answer, not a mistake; the option without ``--dry-run`` is one."""
    file = tmp_path / "tiny.yaml"
    file.write_text("like: a100\nname: thimble\nmemory: 1000000\n", encoding="utf-8")
    assert main(["preset:tiny", "--dry-run", "--device", str(file)]) == 0
    assert "does not fit thimble" in capsys.readouterr().out
    assert main(["preset:tiny", "--dry-run", "--device", "h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["fits"]
    assert main(["preset:tiny", "--device", "h100"]) == 2
    assert "--dry-run" in capsys.readouterr().err

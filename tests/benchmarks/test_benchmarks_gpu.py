"""The benchmark of one GPU, run on a CPU at tiny sizes, so that only the device is new on a GPU."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import PIECES, main
from benchmarks.gpu.measuring import Day, in_turn, seconds
from benchmarks.gpu.models import CAPTURES, GPT, NANOGPT, OURS, PEERS, WAYS, our_side, shape_of
from benchmarks.gpu.page import page
from benchmarks.single.ours import OurTraining
from benchmarks.support.ranks import results_of_ranks

MACHINE = {"machine": "here", "took": 1.0}


def side(rate: float) -> dict[str, float]:
    return {"tokens/s": rate, "TFLOP/s": 500.0, "sheet": 989.0, "GiB": 10.0, "loss": 5.0}


def test_the_page_shows_each_side_and_each_goal_beside_what_was_measured() -> None:
    sides = {**{name: {"failed": "is not installed"} for name in (*WAYS, *PEERS)}, OURS: side(110.0)}
    sides["transformers"] = side(100.0)
    captured = {name: side(120.0 if name == "partial" else 100.0) for name in CAPTURES}
    found = {
        "ceilings": {**MACHINE, "bf16 TFLOP/s": 800.0, "name": "a GPU"},
        "3b": {**MACHINE, "shape": "large", "sides": sides},
        "124m": {**MACHINE, "shape": "small", "sides": {OURS: side(1.0), NANOGPT: side(1.0)}},
        "experts": {**MACHINE, "grouped products": 10.0, "dense layer of equal FLOPs": 8.0},
        "saves": {**MACHINE, "behind the training": {"step ms": 100.0, "lost ms": 300.0, "saves": 3}},
        "graphs": {**MACHINE, "experts": {"shape": "small", "sides": captured}},
    }
    lines = list(page(found))
    assert f"| {OURS} | 110 | 500 | 62.5% | 50.6% | 10.0 | 5.00 |" in lines
    assert "| 56% of the data sheet at 3b | 0.506 | no |" in lines
    assert "| 56% of the data sheet at 1.3b | not measured |  |" in lines
    assert "| 1.02 of the best peer's rate at 3b | 1.100 | yes |" in lines
    assert "| partial graphs 1.10 times eager at experts | 1.200 | yes |" in lines
    assert "| FP8 1.25 times bf16 at 3b | not measured |  |" in lines
    assert "| a layer of experts 0.85 of a dense one's rate | 0.800 | no |" in lines
    assert "| at most 1.10 of nanoGPT's memory at 124m | 1.000 | yes |" in lines
    assert "| at most 2% of 100 steps lost to a save | 0.030 | no |" in lines


def test_a_call_is_timed_after_those_that_warm_up() -> None:
    calls: list[int] = []
    taken = seconds(lambda: calls.append(1), "cpu", samples=4, warm_up=2)
    assert (len(taken), len(calls)) == (4, 6)
    assert min(taken) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["partial", "whole step"])
def test_a_side_with_graphs_replays_them(name: str) -> None:
    """A benchmark trains step by step; were a capture begun anew with each, every side would be eager."""
    side = our_side("cpu", "padded experts", name, shape_of("padded experts", quick=True))
    assert isinstance(side, OurTraining)
    losses = [side.step([]) for _ in range(3)]
    assert side.replays
    side.close()
    eager = our_side("cpu", "padded experts", "eager", shape_of("padded experts", quick=True))
    assert isinstance(eager, OurTraining)
    assert [eager.step([]) for _ in range(3)] == losses
    assert not eager.replays
    eager.close()


def some(device: str, how: str, *, quick: bool) -> dict[str, float]:
    """A side that works, raises, or ends its process."""
    if how == "raises":
        raise RuntimeError(f"no kernel on {device}\nand a second line")
    if how == "dies":
        os._exit(9)
    return {"process": os.getpid(), "quick": quick}


@pytest.mark.nightly
@pytest.mark.multiproc
def test_sides_share_a_process_until_one_ends_it() -> None:
    hows = ["works", "raises", "works", "dies", "works"]
    cases = {f"{index} {how}": {"how": how} for index, how in enumerate(hows)}
    found = dict(in_turn(some, Day("cpu", quick=True), cases))
    assert list(found) == list(cases)
    assert found["1 raises"] == {"failed": "RuntimeError: no kernel on cpu"}
    assert found["3 dies"] == {"failed": "results: rank 0 ended with 9"}
    first, same, other = (found[name]["process"] for name in ("0 works", "2 works", "4 works"))
    assert first == same != other
    assert found["0 works"]["quick"] is True


def hangs() -> Iterator[int]:
    yield 1
    time.sleep(600)


@pytest.mark.nightly
@pytest.mark.multiproc
def test_a_side_that_takes_too_long_is_ended() -> None:
    results = results_of_ranks(hangs, 1, {}, patience=3.0)
    assert next(results) == 1
    with pytest.raises(SystemExit, match="hangs: no result in 3 s"):
        next(results)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_one_line_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--piece", "ceilings"])
    assert "no GPU is here; for a trial without one: --device cpu --quick" in capsys.readouterr().err


def test_no_side_begins_when_the_time_is_over() -> None:
    assert dict(in_turn(some, Day("cpu", until=time.monotonic()), {"late": {"how": "works"}})) == {
        "late": {"failed": "there was no time left"}
    }


def test_a_record_is_written_with_each_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def stopped(*_: object) -> Iterator[tuple[str, dict[str, Any]]]:
        yield OURS, side(3.0)
        seen.append(list(json.loads((tmp_path / "124m.json").read_text("utf-8"))["sides"]))
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.gpu.models.in_turn", stopped)
    with pytest.raises(KeyboardInterrupt):
        main(["--device", "cpu", "--quick", "--out", str(tmp_path), "--piece", "124m"])
    assert seen == [[OURS]]
    assert f"| {OURS} | 3 |" in "\n".join(page({"124m": json.loads((tmp_path / "124m.json").read_text("utf-8"))}))


@pytest.mark.nightly
@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_every_piece_runs_on_a_cpu_at_tiny_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [name for name in PIECES if name not in list(GPT)[1:]]  # tiny, all models are the same
    main(["--device", "cpu", "--quick", "--out", str(tmp_path), "--piece", *pieces])
    shown = capsys.readouterr().out
    for name in pieces:
        found = json.loads((tmp_path / f"{name}.json").read_text("utf-8"))
        assert "failed" not in found
    sides = json.loads((tmp_path / "124m.json").read_text("utf-8"))["sides"]
    assert {
        name for name in (OURS, "nanoGPT, compiled", "megatron-core, local layers") if "failed" in sides[name]
    } == set()
    assert f"| {OURS} |" in shown

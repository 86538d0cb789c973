"""Ranks that a guard names: by doing steps again it tells whose fault it is, and the next start leaves them out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from megatron_run.errors import InputError
from megatron_run.planning import resolve
from megatron_run_cli.reports.dry_run import dry_run_json
from megatron_run_engine import train
from megatron_run_engine.launch.api import _checked
from megatron_run_engine.runtime.world import World
from tests.support.forked import FORKING_AGENT, forked_command, learned, run_forked, tiny

from .test_integration_elastic import ELASTIC, assert_same_numbers, attempts, words

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

STEPS = 8
#: As many token ids as the embedding has rows: the row of the weight that flips is one of them.
IDS: Mapping[str, Any] = {"data.vocab_size": 128}
#: A weight of rank 1 flips once, in a step before the one after which copies are compared: by then all ranks have
#: taken in gradients of it.
FLIP = "rank=1,step=5,at=forward,kind=flip,attempt=1"
EXCLUDE: Mapping[str, Any] = {**ELASTIC, "guard.exclude": ("differing",)}


def values(folder: Path, more: Mapping[str, Any]) -> dict[str, Any]:
    """A run with steps in memory, in a folder for this test."""
    (folder / "memory").mkdir(exist_ok=True)
    memory = {"checkpoint.memory_interval": 2, "checkpoint.memory_folder": str(folder / "memory")}
    return {"train.steps": STEPS, "train.global_batch_size": 12, "checkpoint.interval": 0, **IDS, **memory, **more}


def recorded(run: Path) -> list[dict[str, Any]]:
    file = run / "excluded.json"
    return json.loads(file.read_text())["ranks"] if file.exists() else []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_forked(tiny(folder / "run", {**ELASTIC, **IDS, "train.steps": STEPS}, nproc=3), timeout=250).code == 0
    return folder / "run"


def test_of_two_copies_the_rank_that_is_at_fault_is_told_by_doing_the_steps_again(tmp_path: Path) -> None:
    ran = run_forked(tiny(tmp_path / "run", values(tmp_path, {}), nproc=2), FLIP, timeout=250)
    assert ran.code == 6
    assert ran.message.startswith("after step 6 the copies of embedding.word.weight on ranks 0 and 1 differ")
    assert ": done again from step 4, rank 1 alone has other weights than before, since step 5: a memory" in ran.message
    advice = f"leave local rank 1 of {gethostname()} out, or set guard.exclude=differing and run.elastic=data"
    assert advice in ran.message
    assert recorded(tmp_path / "run") == []
    assert max(learned(tmp_path / "run")) == 6


@pytest.mark.nightly  # of the layouts that split the model too: others feel a wrong weight in the same step
@pytest.mark.parametrize(
    ("split", "plugin", "rank"),
    [({"parallel.pipeline": 2}, "schedule=1f1b", 3), ({"parallel.tensor": 2}, "parallel-layer=tensor", 2)],
)
def test_the_rank_at_fault_is_told_where_ranks_share_a_model(
    split: dict[str, Any], plugin: str, rank: int, tmp_path: Path
) -> None:
    asked = tiny(tmp_path / "run", values(tmp_path, split), (plugin,), nproc=4)
    ran = run_forked(asked, FLIP.replace("rank=1", f"rank={rank}"), timeout=250)
    assert ran.code == 6
    assert f": done again from step 4, rank {rank} alone has other weights than before, since step 5: " in ran.message


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_rank_at_fault_is_left_out_and_the_others_go_on_with_the_same_losses(
    on_disk: bool, whole: Path, tmp_path: Path
) -> None:
    """Without steps in memory nothing is done again, and of three copies two agree."""
    run = tmp_path / "run"
    disk = {"checkpoint.interval": 2, "checkpoint.memory_interval": 0} if on_disk else {}
    asked = tiny(run, values(tmp_path, {**EXCLUDE, **disk}), nproc=3)
    ran = run_forked(asked, FLIP, timeout=250, max_restarts=1)
    assert (ran.code, ran.message) == (0, "")
    assert attempts(run, "ranks", "step") == [(3, 0), (2, 4)]
    (entry,) = recorded(run)
    assert {**entry, "time": "", "reason": ""} == {
        "host": gethostname(), "place": 1, "rank": 1, "step": 6, "attempt": 1, "time": "", "reason": "",
    }  # fmt: skip
    assert entry["reason"].startswith("differing: after step 6 rank 1 holds another ")
    assert_same_numbers(run, whole)
    if on_disk:
        return
    longer = replace(asked, extend=True, values={**asked.values, "train.steps": STEPS + 1})
    later = run_forked(longer, timeout=250)
    assert later.code == 0
    assert attempts(run, "ranks")[2:] == [(2,)], "a later start leaves it out too"
    line = f"excluded.json in the run folder leaves out local rank 1 of {gethostname()}, until it is taken out there"
    assert line in later.told


#: From some learning rate on, rank 1 adds something to its weights: as often as these steps are done.
LEANS = """
import os

import torch


class Leans(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            if group["lr"] < 5e-4 and os.environ.get("RANK") == "1":
                for parameter in group["params"]:
                    parameter.data.add_(1.0)
"""


def test_where_every_rank_comes_to_the_same_weights_again_the_program_is_at_fault(tmp_path: Path) -> None:
    (tmp_path / "leans.py").write_text(LEANS)
    rule = {"optimizer.rule": f"{tmp_path}/leans.py:Leans", "train.lr": 1e-3, "train.lr_warmup": 0}
    asked = tiny(tmp_path / "run", values(tmp_path, {**EXCLUDE, **rule}), nproc=3)
    ran = run_forked(asked, timeout=250, max_restarts=1)
    assert ran.code == 6
    assert ": done again from step 4, every rank has the same weights again: optimizer=adamw of " in ran.message
    assert recorded(tmp_path / "run") == []


@pytest.mark.nightly
def test_a_rank_that_is_slow_in_report_after_report_is_left_out_at_the_next_start(tmp_path: Path) -> None:
    run = tmp_path / "run"
    slow = {"guard.exclude": ("slow",), "guard.straggler_interval": 1, "train.steps": 6}
    faults = "rank=2,at=forward,kind=slow,seconds=0.25;rank=0,step=6,at=data,kind=kill,attempt=1"
    asked = tiny(run, values(tmp_path, {**ELASTIC, **slow}), nproc=3)
    assert run_forked(asked, faults, timeout=250, max_restarts=1).code == 0
    assert attempts(run, "ranks") == [(3,), (2,)]
    (entry,) = recorded(run)
    assert (entry["rank"], entry["place"]) == (2, 2)
    assert entry["reason"].startswith("slow: rank 2 holds the others up in forward: ")
    lines = (run / "logs/attempt-001/rank-00000.log").read_text().splitlines()
    (said,) = [
        line
        for line in lines
        if line.endswith("; the next start leaves rank 2 out, by excluded.json in the run folder")
    ]
    assert len([line for line in lines[: lines.index(said)] if line.startswith("rank 2 holds the others up")]) >= 2


def excluding(run: Path, *places: int) -> None:
    """Let the folder of a run that has not begun exclude local ranks of this host."""
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"id": "0123456789abcdef" * 2, "attempts": []}))
    ranks = [{"host": gethostname(), "place": place} for place in places]
    (run / "excluded.json").write_text(json.dumps({"v": 1, "ranks": ranks}))


def test_a_run_that_fits_on_none_of_the_ranks_that_are_not_excluded_does_not_begin(tmp_path: Path) -> None:
    excluding(tmp_path / "run", 1)
    ran = run_forked(tiny(tmp_path / "run", {**ELASTIC, "run.min_ranks": 2}, nproc=2), timeout=250)
    assert ran.code == 2
    assert any("excluded.json in the run folder leaves out local rank 1 of " in line for line in ran.told)
    assert ran.message.startswith("1 rank is too few: ")


def test_why_a_start_is_refused_is_in_the_status_that_scripts_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    asked = tiny(run, {**ELASTIC, "train.steps": 1}, nproc=2)
    agent = ("--nproc-per-node", "2", "-m", "megatron_run_cli")

    def reported() -> tuple[str, int, bool, str]:
        status = json.loads((run / "status.json").read_text())
        return status["state"], status["exit_code"], status["retry"], status["message"]

    def start_again() -> int:
        return run_forked(asked, timeout=250).code

    assert (start_again(), reported()) == (0, ("finished", 0, False, ""))
    (run / "excluded.json").write_text("odd")
    assert start_again() == 2
    refused = reported()
    assert refused[:3] == ("finished", 2, False)
    assert refused[3].startswith(f"{run}/excluded.json does not say which ranks are left out: ")
    (run / "excluded.json").unlink()
    assert (start_again(), reported()) == (0, ("finished", 0, False, ""))
    (run / "excluded.json").write_text("odd")
    with pytest.raises(InputError, match="does not say which ranks are left out"):
        train(resolve(asked))
    assert reported() == refused
    forget = {**json.loads((run / "status.json").read_text()), "exit_code": 0, "message": ""}
    (run / "status.json").write_text(json.dumps(forget))
    assert forked_command((*agent, *words(asked)), tmp_path, timeout=200, program=FORKING_AGENT).returncode == 1
    assert reported() == refused
    # What a rank finds before it meets the others.
    memory = {"checkpoint.memory_interval": 2, "checkpoint.memory_folder": str(tmp_path / "nowhere")}
    without = resolve(replace(asked, values={**asked.values, **memory}))
    for rank in (1, 0):
        with pytest.raises(InputError, match="there is no folder"):
            _checked(without, World(rank, 2))
        assert (reported() == refused) == (rank == 1), "rank 0 speaks for all"
    assert reported()[3].startswith(f"there is no folder {tmp_path}/nowhere for steps in memory")


def test_a_spare_takes_the_place_of_a_rank_that_is_left_out(tmp_path: Path) -> None:
    excluding(tmp_path / "run", 1)
    asked = tiny(tmp_path / "run", {**ELASTIC, "train.global_batch_size": 8, "train.steps": 1}, nproc=3)
    line = f"excluded.json in the run folder leaves out local rank 1 of {gethostname()}, until it is taken out there"
    assert line in dry_run_json(resolve(asked, plan_only=True))["notices"]
    ran = run_forked(asked, timeout=250)
    assert (ran.code, attempts(tmp_path / "run", "ranks", "spares")) == (0, [(2, 0)])
    assert [line for line in ran.told if line.startswith("run.elastic")] == [
        "run.elastic=data: 2 of 2 ranks train as data 2, 4 microbatches a step"
    ]


def test_under_torchrun_an_excluded_rank_stands_by_and_the_others_are_numbered_anew(tmp_path: Path) -> None:
    excluding(tmp_path / "run", 0)
    agent = ("--nproc-per-node", "3", "-m", "megatron_run_cli")
    asked = tiny(tmp_path / "run", {**ELASTIC, "train.steps": 2})
    done = forked_command((*agent, *words(asked)), tmp_path, timeout=200, program=FORKING_AGENT)
    assert done.returncode == 0, done.stderr
    assert f"excluded.json in the run folder leaves out local rank 0 of {gethostname()}" in done.stderr
    assert "run.elastic=data: 2 of 2 ranks train as data 2" in done.stderr
    assert attempts(tmp_path / "run", "ranks", "spares") == [(2, 0)]
    log = (tmp_path / "run/logs/attempt-001/rank-00002.log").read_text()
    assert "local rank 0 is left out: ranks 0 to 1 train" in log
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "finished"


@pytest.mark.nightly  # another start of an agent
def test_under_torchrun_the_others_look_for_the_notice_where_the_first_of_a_host_is_left_out(tmp_path: Path) -> None:
    excluding(tmp_path / "run", 0)
    (tmp_path / "notice").touch()
    agent = ("--nproc-per-node", "3", "-m", "megatron_run_cli")
    asked = tiny(tmp_path / "run", {**ELASTIC, "train.steps": 100, "run.stop_file": str(tmp_path / "notice")})
    slow = {"MEGATRON_RUN_FAULT": "at=data,kind=slow,seconds=0.02"}
    forked_command((*agent, *words(asked)), tmp_path, timeout=200, program=FORKING_AGENT, variables=slow)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 143)


@pytest.mark.nightly  # two starts of an agent's ranks
def test_under_torchrun_a_rank_at_fault_is_left_out_at_its_next_start(whole: Path, tmp_path: Path) -> None:
    agent = ("--nproc-per-node", "3", "--max-restarts", "1", "--monitor-interval", "0.2", "-m", "megatron_run_cli")
    asked = tiny(tmp_path / "run", values(tmp_path, {**EXCLUDE, "guard.exclude": "differing"}))
    fault = {"MEGATRON_RUN_FAULT": FLIP.replace("rank=1", "rank=0")}
    done = forked_command((*agent, *words(asked)), tmp_path, timeout=250, program=FORKING_AGENT, variables=fault)
    assert done.returncode == 0, done.stderr
    assert attempts(tmp_path / "run", "ranks", "step") == [(3, 0), (2, 4)]
    assert [entry["place"] for entry in recorded(tmp_path / "run")] == [0]
    assert_same_numbers(tmp_path / "run", whole)

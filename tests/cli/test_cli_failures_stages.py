"""A stage that fails in the middle of a step: the command ends in time, and names the rank and the action."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.support.commands import TORCHRUN, run_command
from tests.support.forked import forked_command

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

#: Model gpt, with ``tamper`` in one forward of one rank: of microbatch 1 in step 2.
MODEL = """
import os, signal, time
from dataclasses import replace

import torch
from megatron_run import PluginInfo, hookimpl
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions


def tamper(out):
    {tamper}
    return out


class Tampered(Gpt):
    def build_chunk(self, *arguments):
        chunk = super().build_chunk(*arguments)
        if self._context.topology.rank == {rank}:
            forward = chunk.forward

            def tampered(x, microbatch):
                out = forward(x, microbatch)
                return tamper(out) if (microbatch.step, microbatch.index) == (2, 1) else out

            chunk.forward = tampered
        return chunk


@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("model", "tampered", options=GptOptions)


@hookimpl
def megatron_run_create_model(context, options):
    return Tampered(context, options)
"""
SETS = ("run.threads=1", "run.folder=run", "train.steps=3", "eval.interval=0")
WORDS = ("preset:tiny", "--plugin", "schedule=1f1b", "--plugin", "model=./tampered.py")
#: Seconds after which ranks that wait for ever would give up, and within which a run must have ended however busy the
#: machine is: nobody waits for that.
TIMEOUT, SOON = 100, 60


def words(timeout: float, stages: int) -> list[str]:
    """What is typed after the command's name."""
    sets = (*SETS, f"run.timeout={timeout}", f"parallel.pipeline={stages}")
    return [*WORDS, *(word for each in sets for word in ("--set", each))]


def failure(folder: Path, tamper: str, *, rank: int, code: int, timeout: float = TIMEOUT, stages: int = 2) -> str:
    """The last line of a run in whose second step ``rank`` does ``tamper`` in F1.0; it ends with ``code``, in time."""
    (folder / "tampered.py").write_text(MODEL.format(tamper=tamper, rank=rank))
    done = forked_command(words(timeout, stages), folder)
    after_step_1 = time.time() - (folder / "run" / "metrics.jsonl").stat().st_mtime
    assert done.returncode == code, done.stderr
    assert after_step_1 < SOON
    status = json.loads((folder / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", code, 1)
    line = done.stderr.splitlines()[-1].removeprefix("megatron-run: ")
    assert status["message"] == line
    return re.sub(r"log: [^)]*/rank-0000(\d)\.log", r"log \1", line.replace(str(folder), "."))


def test_a_stage_that_is_killed_is_named_with_the_action_in_which_it_was(tmp_path: Path) -> None:
    line = failure(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", rank=1, code=4)
    assert line == "a rank was killed by SIGKILL in forward F1.0 of step 2 (rank 1, log 1)"


def hung(line: str, rank: int, waiting: int) -> bool:
    """Whether ``line`` names the rank with its action, and the stage before it that waits for it."""
    waits = f"receive the gradient of microbatch 1 from stage {rank} to stage {waiting} of step 2"
    told = f"in forward F1.0 of step 2, rank {waiting} waits for it in {waits}; see the log of that rank"
    return re.sub(r"for \d+\.\d s", "", line).startswith(f"rank {rank} hangs: nothing new  {told}")


def test_a_stage_that_hangs_is_named_with_its_action_and_the_one_that_waits(tmp_path: Path) -> None:
    line = failure(tmp_path, "time.sleep(600)", rank=1, code=4, timeout=4)
    assert hung(line, 1, 0), line
    assert line.endswith(" (log 1)"), line


LAST = "while exchanging the gradient of microbatch 1 from stage 3 to stage 2 (from rank 2, action 4, B1.0)"


def test_of_four_stages_the_one_that_hangs_is_named_and_none_that_waited_in_vain(tmp_path: Path) -> None:
    line = failure(tmp_path, "time.sleep(600)", rank=3, code=4, timeout=4, stages=4)
    assert hung(line, 3, 2), line


@pytest.mark.nightly
def test_under_torchrun_one_rank_speaks_and_nobody_blames_another(tmp_path: Path) -> None:
    (tmp_path / "tampered.py").write_text(MODEL.format(tamper="os.kill(os.getpid(), signal.SIGKILL)", rank=3))
    run = (*TORCHRUN, "--nproc-per-node", "4", "-m", "megatron_run_cli", *words(TIMEOUT, 4))
    said = re.findall(r"^megatron-run: (.*)", run_command(run, tmp_path, timeout=90).stderr, re.MULTILINE)
    assert [line.partition(" (rank 2, log: ")[0] for line in said] == [
        f"rank 3 (stage 3) is lost: its connection broke {LAST}"
    ]
    told = json.loads((tmp_path / "run" / "status.json").read_text())["message"]  # rank 0's, or that of its sidecar
    assert told.startswith(
        ("rank 3 (stage 3) is lost: ", "rank 3 was lost: its process ended without a word in forward F1.0")
    )


@pytest.mark.parametrize(
    ("tampered", "found"),
    [("out.x[:-1]", "(31, 2, 32) torch.float32"), ("out.x.double()", "(32, 2, 32) torch.float64")],
    ids=["shape", "dtype"],
)
def test_a_stage_that_would_send_what_its_model_did_not_declare(tampered: str, found: str, tmp_path: Path) -> None:
    line = failure(tmp_path, f"out = replace(out, x={tampered})", rank=0, code=3)
    assert line == (
        f"the activation of microbatch 1 from stage 0 to stage 1 is {found}, "
        "plugin model=tampered of ./tampered.py declared (32, 2, 32) torch.float32 "
        "(from rank 0, action 1, F1.0); make Model.boundary and the chunk's output agree (rank 0, log 0)"
    )


def test_a_layer_that_raises_is_a_bug_with_its_line_and_action(tmp_path: Path) -> None:
    line = failure(tmp_path, "raise ValueError('a bad layer')", rank=1, code=1)
    assert line == "ValueError: a bad layer (in ./tampered.py:11, rank 1, action 2, F1.0) (rank 1, log 1)"
    traceback = (tmp_path / "run" / "logs" / "attempt-001" / "rank-00001.log").read_text()
    assert "ValueError: a bad layer\nrank 1, action 2, F1.0\n" in traceback

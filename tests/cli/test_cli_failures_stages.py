"""A stage that fails in the middle of a step: the real command ends in time, and names the rank and the action."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.support.commands import COMMAND, run_command

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

#: Model gpt, with ``tamper`` in one forward of one rank: of microbatch 1 in step 2.
MODEL = """
import os, signal, time
from dataclasses import replace

import torch
from megatron_run import PluginInfo, hookimpl
from megatron_run.builtin.model.gpt import Gpt, GptOptions


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
#: Seconds that other ranks get to end by themselves, and some for a busy machine.
GRACE = 5 + 10


def failure(folder: Path, tamper: str, *, rank: int, code: int, timeout: float = 30, within: float = GRACE) -> str:
    """The last line of a run in whose second step ``rank`` does ``tamper`` in F1.0; it ends with ``code``, in time."""
    (folder / "tampered.py").write_text(MODEL.format(tamper=tamper, rank=rank))
    sets = [word for each in (*SETS, f"run.timeout={timeout}") for word in ("--set", each)]
    done = run_command((*COMMAND, *WORDS, *sets), folder)
    after_step_1 = time.time() - (folder / "run" / "metrics.jsonl").stat().st_mtime
    assert done.returncode == code, done.stderr
    assert after_step_1 < within
    status = json.loads((folder / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", code, 1)
    line = done.stderr.splitlines()[-1].removeprefix("megatron-run: ")
    assert status["message"] == line
    return re.sub(r"log: [^)]*/rank-0000(\d)\.log", r"log \1", line.replace(str(folder), "."))


LOST = "while exchanging the gradient of microbatch 1 from stage 1 to stage 0 (from rank 0, action 5 of 8, B1.0)"


def test_a_stage_that_is_killed_is_named_with_the_action_that_waited_for_it(tmp_path: Path) -> None:
    line = failure(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", rank=1, code=4)
    lost = f"rank 1 (stage 1) is lost: its connection broke {LOST}"
    assert line == f"a rank was killed by SIGKILL (rank 1, log 1); {lost}"


def test_a_stage_that_hangs_is_named_with_the_action_that_waited_and_the_time_limit(tmp_path: Path) -> None:
    line = failure(tmp_path, "time.sleep(600)", rank=1, code=4, timeout=4, within=4 + GRACE)
    lost = f"rank 1 (stage 1) is lost: it did not answer within 4 s {LOST}"
    assert line == f"{lost} (rank 0, log 0); rank 1 did not end and was killed"


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
        "(from rank 0, action 2 of 8, F1.0); make Model.boundary and the chunk's output agree (rank 0, log 0)"
    )


def test_a_layer_that_raises_is_a_bug_with_its_line_and_action(tmp_path: Path) -> None:
    line = failure(tmp_path, "raise ValueError('a bad layer')", rank=1, code=1)
    assert line == "ValueError: a bad layer (in ./tampered.py:11, rank 1, action 3 of 8, F1.0) (rank 1, log 1)"
    traceback = (tmp_path / "run" / "logs" / "attempt-001" / "rank-00001.log").read_text()
    assert "ValueError: a bad layer\nrank 1, action 3 of 8, F1.0\n" in traceback

"""Layers that do not split: one line, exit code 2, and nothing is started or written."""

from __future__ import annotations

import json
import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_run_cli.main import main
from tests.support.commands import free_port, world_of_two
from tests.support.forked import ForkedCommand, forked_command

Output = pytest.CaptureFixture[str]

TWO = "--plugin parallel-layer=tensor"
NORMS = f"{Path(__file__).parents[1]}/examples/plugins/parallel_layer.py"
GROUNDLESS = "parallel-layer=parallel_layer changes layers of the factory below it: there is none below it (from "
FOUR = f"{TWO} --set parallel.tensor=4"
MISTAKES = {
    "tensor with dense": (
        "--set parallel.tensor=2",
        (
            "parallel.tensor=2 needs a plugin that serves it: parallel-layer=dense does not (from --set "
            "parallel.tensor); choose --plugin parallel-layer=te or --plugin parallel-layer=tensor; or set "
            "parallel.tensor=1"
        ),
    ),
    "sequence with dense": (
        "--set parallel.sequence=true",
        (
            "parallel.sequence=true needs a plugin that serves it: parallel-layer=dense does not (from --set "
            "parallel.sequence); choose --plugin parallel-layer=te or --plugin parallel-layer=tensor; or set "
            "parallel.sequence=false"
        ),
    ),
    "a factory that changes another, alone": (
        f"--plugin parallel-layer={NORMS}",
        f"{GROUNDLESS}--plugin parallel-layer={NORMS}); write --plugin parallel-layer=dense+{NORMS}",
    ),
    "a factory below the one that it changes": (
        f"--plugin parallel-layer={NORMS}+tensor",
        f"{GROUNDLESS}--plugin parallel-layer={NORMS}+tensor); write --plugin parallel-layer=tensor+{NORMS}",
    ),
    "two factories that make every layer": (
        f"--plugin parallel-layer=tensor+dense+{NORMS}",
        (
            "parallel-layer=tensor and parallel-layer=dense each make every layer: the upper would hide the lower "
            f"(from --plugin parallel-layer=tensor+dense+{NORMS}); write --plugin parallel-layer=tensor+{NORMS} or "
            f"--plugin parallel-layer=dense+{NORMS}"
        ),
    ),
    "heads": (
        f"{FOUR} --set model.num_heads=2",
        (
            "2 attention heads (model.num_heads) do not split over 4 tensor-parallel ranks: 2 / 4 = 0.5 (from --set "
            "parallel.tensor and --set model.num_heads); set parallel.tensor to 2, or choose 4 attention heads "
            "(model.num_heads)"
        ),
    ),
    "heads whose features do not divide either": (
        f"{TWO} --set model.num_heads=3 --set model.hidden_size=33",
        (
            "3 attention heads (model.num_heads) do not split over 2 tensor-parallel ranks: 3 / 2 = 1.5 (from the "
            "suggestion of parallel-layer=tensor and --set model.num_heads); set parallel.tensor to 1 or 3, or choose "
            "2 or 4 attention heads (model.num_heads)"
        ),
    ),
    "key-value heads": (
        f"{FOUR} --set model.num_heads=4 --set model.num_kv_heads=2",
        (
            "2 key-value heads (model.num_kv_heads) do not split over 4 tensor-parallel ranks: 2 / 4 = 0.5 (from --set "
            "parallel.tensor and --set model.num_kv_heads); set parallel.tensor to 2, or choose 4 key-value heads "
            "(model.num_kv_heads)"
        ),
    ),
    "feed-forward features": (
        f"{TWO} --set model.ffn_size=33",
        (
            "33 features of up (model.ffn_size) do not split over 2 tensor-parallel ranks: 33 / 2 = 16.5 (from the "
            "suggestion of parallel-layer=tensor and --set model.ffn_size); set parallel.tensor to 1 or 3, or choose "
            "32 or 34 features of up (model.ffn_size)"
        ),
    ),
    "tokens": (
        f"{TWO} --set parallel.sequence=true --set train.sequence_length=33",
        (
            "33 tokens of train.sequence_length do not split over 2 tensor-parallel ranks: 33 / 2 = 16.5 (from the "
            "suggestion of parallel-layer=tensor and --set train.sequence_length); set parallel.tensor to 1 or 3, or "
            "choose 32 or 34 tokens of train.sequence_length"
        ),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("option", ["", "--dry-run", "--dry-run --json"])
def test_the_command_says_so_in_one_line_and_leaves_nothing_behind(
    mistake: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    typed, line = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    assert main(["preset:tiny", "--quiet", *shlex.split(typed), *shlex.split(option)]) == 2
    said = capsys.readouterr()
    assert said.err == f"megatron-run: {line}\n"
    assert (json.loads(said.out)["message"] if "--json" in option else said.out) == (line if "--json" in option else "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multiproc
def test_ranks_of_somebody_elses_world_say_it_once(tmp_path: Path) -> None:
    typed, line = MISTAKES["feed-forward features"]
    port = free_port()
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                ForkedCommand(("preset:tiny", *shlex.split(typed)), tmp_path, **world_of_two(rank, port))
            )
            for rank in range(2)
        ]
        said = "".join("".join(rank.communicate(timeout=60)) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert said.count(line) == 1
    assert list(tmp_path.iterdir()) == []


#: A model that reads a value of its parameters while it is built, which only memory has.
MODEL = """
from megatron_run import PluginInfo, hookimpl
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions


class Touchy(Gpt):
    def build_chunk(self, *arguments):
        chunk = super().build_chunk(*arguments)
        next(chunk.parameters()).sum().item()
        return chunk


@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("model", "touchy", options=GptOptions)


@hookimpl
def megatron_run_create_model(context, options):
    return Touchy(context, options)
"""


@pytest.mark.multiproc
def test_a_model_that_cannot_be_built_in_advance_is_left_to_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "touchy.py").write_text(MODEL)
    sets = ("run.folder=run", "run.threads=1", "train.steps=1", "eval.batches=1")
    words = ["--plugin", "model=./touchy.py", *shlex.split(TWO), *(word for each in sets for word in ("--set", each))]
    assert forked_command(("preset:tiny", "--quiet", *words), tmp_path).returncode == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1

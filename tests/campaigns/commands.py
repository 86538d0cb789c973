"""Every command with words that make it work: what it needs beside it, and what it writes there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import click

from megatron_run_cli.main import main
from tests.support.command_tree import every_command
from tests.support.forked import TINY
from tests.support.small_models import GPT2, saved_network


class Case(NamedTuple):
    """``words`` after the command's own; the ``needs`` of :func:`make_inputs`; and the names that it ``writes``."""

    words: str = ""
    needs: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    #: Whether all of these are there or none; else each is one by itself, a picture beside a text.
    together: bool = True
    #: What stays of a command that did not end, for the same command to go on with. One of ``writes`` is a run folder.
    goes_on: str = ""

    def typed(self, command: str) -> list[str]:
        """What follows ``megatron-run``."""
        return [*command.split(), *self.words.split()]


_SETS = " ".join(
    f"--set {key}={value}"
    for key, value in TINY.items()
    if key != "train.steps" and not key.startswith(("model", "data"))
)
_RUN = f"{_SETS} --set train.steps=2 --set run.folder=out --quiet"
_TEXTS = "a.jsonl --tokenizer bytes --workers 1"
#: By command, all that there are: a test holds it.
COMMANDS: Mapping[str, Case] = {
    "train": Case(f"preset:tiny {_RUN}", writes=("out",), goes_on="out"),
    "finetune": Case(
        f"run --data a.txt --set data.tokenizer=bytes {_RUN.replace('length=8', 'length=16')}",
        ("run", "a.txt"),
        ("out",),
        goes_on="out",
    ),
    "plugins new": Case("schedule zigzag", writes=("megatron-run-schedule-zigzag",)),
    "schedule show": Case(
        "--plugin schedule=1f1b --stages 2 --microbatches 3 --svg a.svg --trace a.json",
        writes=("a.svg", "a.json"),
        together=False,
    ),
    "plan search": Case(
        "preset:tiny --gpus 2 --write out.yaml --timeline out.svg", writes=("out.yaml", "out.svg"), together=False
    ),
    "plan schedule": Case(
        "preset:tiny --set parallel.pipeline=2 --set train.global_batch_size=8 --effort 0.1"
        " --write out.py --timeline out.svg",
        writes=("out.py", "out.svg"),
        together=False,
    ),
    "import": Case("hf out", ("hf",), ("out",)),
    "export": Case("run out --to huggingface", ("run",), ("out",)),
    "data prepare": Case(
        f"{_TEXTS} --out out", ("a.jsonl",), ("out.bin", "out.idx", "out.json"), together=False, goes_on="out.preparing"
    ),
    "data clean": Case(
        f"{_TEXTS} --out out.jsonl.gz --min-tokens 1", ("a.jsonl",), ("out.jsonl.gz", "out.removed.jsonl")
    ),
    "data train-tokenizer": Case("a.jsonl --vocab-size 300 --out out.json", ("a.jsonl",), ("out.json",)),
    "data convert": Case("ids.jsonl out", ("ids.jsonl",), ("out.bin", "out.idx")),
    "config show": Case("preset:tiny"),
    "config explain": Case("train.lr"),
    "config schema": Case("--write", writes=("megatron-run.schema.json",)),
    "config from-megatron": Case("train.sh", ("train.sh",)),
    "plugins list": Case(),
    "plugins info": Case("schedule=1f1b"),
    "plugins why": Case("schedule preset:tiny"),
    "plugins check": Case("schedule=1f1b"),
    "plugins search": Case("zigzag"),
    "report": Case("run --text", ("run",)),  # its page is written as other files are: tests/report
    # Its runs write as any run does; tests/sweep kills it.
    "sweep": Case("preset:tiny --over train.lr=1e-3,1e-2 --table --folder nowhere"),
    "plan goodput": Case("preset:tiny --gpus 64 --days 1"),
    "plan check": Case("table.csv", ("table.csv",)),
    # It measures this machine for half a minute; what it writes, it writes as the others do.
    "plan calibrate": Case("--device nowhere"),
    "checkpoint list": Case("run", ("run",)),
    "checkpoint verify": Case("run", ("run",)),
    "checkpoint inspect": Case("run", ("run",)),
    "data cache": Case("--prune --days 0"),
    "data inspect": Case("data", ("data.bin", "data.idx")),
    "generate": Case("run 1,2,3 --tokens --max-new-tokens 2", ("run",)),
    "eval model": Case("run --task perplexity=a.txt", ("run", "a.txt")),
    "eval overlap": Case("a.txt a.jsonl", ("a.txt", "a.jsonl")),
    "eval harness": Case("run --tasks arc_easy", ("run",)),
    "doctor": Case("--json"),
    "completion": Case("bash"),
}
WRITERS = tuple(command for command, case in COMMANDS.items() if case.writes)


def leaves() -> Iterator[str]:
    """The commands that do something, as they are typed."""
    yield from (" ".join(words) for words, command in every_command() if not isinstance(command, click.Group))


SCRIPT = """
torchrun pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --train-iters 2 \\
    --global-batch-size 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 60
"""
TABLE = """# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,\
data parallelism,pipeline parallelism,iteration time (ms)
8,8,1,1024,16,8,1024,1,8,1,100
"""


def make_inputs(folder: Path) -> None:
    """What commands need, made in the new ``folder``: texts, ids, a run with a saved step, its export, a script."""
    folder.mkdir(parents=True)
    lines = [f"document {number * 7919} of words {number * 104729 % 997} and more words" for number in range(40)]
    (folder / "a.txt").write_text("\n".join(lines))
    (folder / "a.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    (folder / "ids.jsonl").write_text("".join(f'{{"tokens": [{n}, {n + 1}, 3]}}\n' for n in range(40)))
    (folder / "train.sh").write_text(SCRIPT)
    (folder / "table.csv").write_text(TABLE)
    saved_network(folder / "run", {**GPT2, "vocab_size": 260})
    place = str(folder)
    with redirect_stdout(StringIO()):
        assert main(["export", f"{place}/run", f"{place}/hf", "--to", "huggingface"]) == 0
        assert main(["data", "convert", f"{place}/ids.jsonl", f"{place}/data"]) == 0


def place_inputs(case: Case, inputs: Path, folder: Path) -> None:
    """Put what ``case`` needs into ``folder``."""
    for name in case.needs:
        (shutil.copytree if (inputs / name).is_dir() else shutil.copyfile)(inputs / name, folder / name)

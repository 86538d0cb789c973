"""Ranks that die, hang, stay away and return at random: the run ends as if nothing had been, sample by sample."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_run.config.request import Request
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from tests.campaigns.figures import Figures, campaign
from tests.support.forked import FORKING_AGENT, forked_command, learned, run_forked, saved_bits, tiny
from tests.support.saved_steps import read_all

LAST, BATCH = 8, 24
#: Where another layout rounds otherwise: of losses, and of all that is saved in fp32.
ROUNDING = 2e-6
#: Seconds after which a rank hangs.
LIMIT = 3.0
DATA = Path(__file__).with_name("counted_data.py")
OPTIMIZERS = ("adamw", "zero1", "zero3")
#: A schedule, and the parallel sizes with which it is tried.
SCHEDULES: Sequence[tuple[str, Mapping[str, int]]] = (
    ("sequential", {}),
    ("1f1b", {"parallel.pipeline": 2}),
    ("gpipe", {"parallel.pipeline": 2}),
    ("interleaved", {"parallel.pipeline": 2, "parallel.chunks": 2}),
    ("zero-bubble", {"parallel.pipeline": 2}),
)
ANYWHERE = ("data", "forward", "backward", "gradient-reduce", "optimizer", "save", "save-shard")
ALONE = ("data", "forward", "optimizer")


@dataclass(frozen=True)
class Shape:
    """What is trained on how many ranks in full strength."""

    ranks: int
    optimizer: str
    schedule: str
    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def drawn(cls, draw: random.Random) -> Shape:
        """One of all."""
        schedule, sizes = draw.choice(SCHEDULES)
        ranks = draw.choice((2, 4, 6, 8) if sizes else (2, 3, 4, 6, 8))
        return cls(ranks, draw.choice(OPTIMIZERS), schedule, tuple(sizes.items()))

    @property
    def least(self) -> int:
        """The ranks that hold one copy of the model."""
        return dict(self.sizes).get("parallel.pipeline", 1)

    def request(self, folder: Path, ranks: int | None = None) -> Request:
        """A run of every step saved in ``folder``; without ``ranks`` somebody else starts them."""
        values = {
            "model.num_layers": 4,
            "train.steps": LAST,
            "train.global_batch_size": BATCH,
            "run.elastic": "data",
            "run.timeout": LIMIT if ranks else 60,
            "checkpoint.keep": 3,
            "data.folder": str(folder),
            "data.samples": 2 * LAST * BATCH,
            **dict(self.sizes),
        }
        plugins = (f"optimizer={self.optimizer}", f"schedule={self.schedule}", f"data={DATA}")
        return tiny(folder, values, plugins, nproc=ranks)


def local_faults(draw: random.Random, ranks: int) -> tuple[str, int]:
    """Deaths, hangs and absences of one rank or another, attempt by attempt; and the fewest ranks that are left."""
    faults: list[str] = []
    attempt, step, left, fewest = 1, 0, ranks, ranks
    for _ in range(draw.randint(1, 3)):
        rank, step = draw.randrange(min(2, ranks)), step + draw.randint(1, 2)
        what = draw.choice(("kill", "kill", "hang", "gone", "gone"))
        if what == "gone" and left > 1:  # twice before a step: the others go on without it
            left -= 1
            fewest = min(fewest, left)
            faults += [f"rank={rank},attempt={each},at=load,kind=kill" for each in (attempt, attempt + 1)]
            attempt += 2
        else:
            left, kind = ranks, "kill" if what == "gone" else what
            at = draw.choice(ANYWHERE if kind == "kill" else ALONE)
            faults.append(f"rank={rank},step={step},attempt={attempt},at={at},kind={kind}")
            attempt += 1
    return ";".join(faults), fewest


class Elastic:
    """Trials, each against a run of its shape that nothing disturbed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.attempts: Counter[int] = Counter()
        self.struck: Counter[str] = Counter()

    def trial(self, seed: int) -> Sequence[str]:
        """Disturb a run until it has ended well; what was not as promised."""
        draw = random.Random(seed)
        shape, folder = Shape.drawn(draw), self._folder / f"run-{seed}"
        whole = self._folder / f"whole-{seed}"
        undisturbed = run_forked(shape.request(whole, shape.ranks), timeout=300)
        assert not undisturbed.code, undisturbed.message
        how = "torchrun" if draw.random() < 0.4 else "launcher"
        faults = [*(_by_torchrun if how == "torchrun" else _by_launcher)(draw, shape, folder)]
        if not faults:
            faults += compared(folder, whole) + miscounted(folder, whole)
            sizes = [entry["ranks"] for entry in _begun(folder)]
            self.attempts[len(sizes)] += 1
            self.struck.update([how, shape.optimizer, shape.schedule, *(["other sizes"] if len({*sizes}) > 1 else [])])
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(whole)
        return [f"seed {seed}, {how}, {shape}: {each}" for each in faults]


def _by_launcher(draw: random.Random, shape: Shape, folder: Path) -> Iterator[str]:
    """One command; where the ranks that are left are fewer than any layout takes, another one once all are back."""
    fault, fewest = local_faults(draw, shape.ranks)
    request = shape.request(folder, shape.ranks)
    ran = run_forked(request, fault, timeout=400, max_restarts=12)
    if ran.code == 4 and fewest < shape.least and "not started again: 1 rank is too few" in ran.message:
        ran = run_forked(request, timeout=400)
    if ran.code:
        yield f"{fault}: it ended with {ran.code}: {ran.message}"


def _by_torchrun(draw: random.Random, shape: Shape, folder: Path) -> Iterator[str]:
    """Starts of an agent with other numbers of ranks, the last of which nothing disturbs."""
    request = shape.request(folder)
    sets = [word for key, value in request.values.items() for word in ("--set", f"{key}={value}")]
    plugins = [word for plugin in request.plugins for word in ("--plugin", plugin)]
    starts, attempt = draw.randint(2, 3), 1
    for start in range(starts):
        ranks = shape.ranks if start == 0 else draw.randint(2, 8)
        last = start == starts - 1
        words = ("--nproc-per-node", str(ranks), "--max-restarts", "1", "-m", "megatron_run_cli")
        steps = (2 * start + 1, 2 * start + 2)  # one of the first start, one of the restart
        dies = [f"rank=0,step={step},attempt={attempt + each},at=backward,kind=kill" for each, step in enumerate(steps)]
        ended = forked_command(
            (*words, "preset:tiny", *sets, *plugins),
            folder.parent,
            timeout=400,
            variables={} if last else {"MEGATRON_RUN_FAULT": ";".join(dies)},
            program=FORKING_AGENT,
        )
        attempt += 2
        if last and ended.returncode:
            yield f"it did not end on {ranks} ranks: {ended.stderr}"


def _begun(folder: Path) -> list[dict[str, Any]]:
    attempts = json.loads((folder / "run.json").read_text())["attempts"]
    return [entry for entry in attempts if "step" in entry]


def compared(folder: Path, whole: Path) -> list[str]:
    """What differs from the ``whole`` run in losses and the last saved state; between other layouts rounding may."""
    got, expected = learned(folder), learned(whole)
    if got.keys() != expected.keys():
        return [f"steps {sorted(got)}"]
    same = {json.dumps(entry["layout"]) for entry in (*_begun(folder), *_begun(whole))}
    if len(same) == 1:
        equal = saved_bits(folder, LAST) == saved_bits(whole, LAST) and got == expected
        return [] if equal else ["the same layout has other bits"]
    losses = max(abs(got[step]["loss"] - expected[step]["loss"]) for step in expected)
    first, second = (read_all(Checkpoints(each / "checkpoints"), LAST) for each in (folder, whole))
    values = max(
        float((first[name][field] - second[name][field]).abs().max())
        for name in second
        for field in second[name]
        if second[name][field].dtype == torch.float32
    )
    return [f"losses differ by {losses:.1e}, values by {values:.1e}"] if max(losses, values) > ROUNDING else []


def miscounted(folder: Path, whole: Path) -> list[str]:
    """Samples that were lost, repeated, or came at another step than in the ``whole`` run."""
    expected, got = consumed(whole), consumed(folder)
    seen = [index for step in got.values() for index in step]
    faults = [] if len({*seen}) == len(seen) == LAST * BATCH else ["a sample was repeated or lost"]
    return faults + [f"step {step} had other samples" for step in expected if got.get(step) != expected[step]]


def consumed(folder: Path) -> dict[int, list[int]]:
    """By step the samples of the attempt that did it last, in ascending order; each data-parallel rank's counted once.

    Before its first step a rank reads as many samples as are fingerprinted, which no step has.
    """
    found: dict[int, list[int]] = {}
    for entry in _begun(folder):
        share = BATCH // entry["layout"]["data"]
        groups: dict[int, set[tuple[int, ...]]] = {}
        for file in (folder / "reads").glob(f"{entry['attempt']}-*"):
            reads = [int(line) for line in file.read_text().split()][FINGERPRINT:]
            for place in range(0, len(reads) - share + 1, share):
                groups.setdefault(entry["step"] + 1 + place // share, set()).add(tuple(reads[place : place + share]))
        found |= {step: sorted(index for each in shares for index in each) for step, shares in groups.items()}
    return found


#: Reads of each rank before it trains.
FINGERPRINT = 8


def elastic(folder: Path, count: int, seed: int, jobs: int) -> Figures:
    """So many disturbed runs."""
    trials = Elastic(folder)
    figures = campaign(
        "deaths, hangs, absences and returns: weights, losses and samples of an undisturbed run",
        trials.trial,
        range(seed, seed + count),
        jobs,
    )
    figures.notes += [
        ", ".join(f"{what} {times}" for what, times in sorted(trials.struck.items())),
        "attempts: " + ", ".join(f"{times} of {number}" for number, times in sorted(trials.attempts.items())),
    ]
    return figures

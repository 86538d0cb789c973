"""A run goes on with its experts split over other numbers of ranks, and with another optimizer, as if nothing happened.

Every value of weights and moments has the bits that were saved.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_run_engine.checkpoint.reader import Reader
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from tests.support.installed import found_once
from tests.support.ranks import run_ranks
from tests.support.resuming import SMALL, attempt, only_step
from tests.support.saved_steps import same_bits
from tests.support.training import kept_groups

pytestmark = pytest.mark.multiproc

EACH = 1
#: What four ranks do for a step each, one after the other: (expert, tensor, optimizer).
CHAIN = ((2, 1, "zero1"), (1, 1, "adamw"), (4, 1, "zero1"), (2, 2, "adamw"))
ENDS = list(accumulate(EACH for _ in CHAIN))


def settings(expert: int, tensor: int, optimizer: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    sets = {
        **SMALL,
        "model.experts.count": 4,
        "model.experts.router.bias_rate": 0.05,
        "train.steps": ENDS[-1],
        "checkpoint.interval": 0,
        "train.lr_shape": "constant",
        "train.lr_warmup": 0,  # its first step would change no weight, and any would be what was saved
    }
    layers = ("parallel-layer=tensor",) if tensor > 1 else ()
    return {**sets, "parallel.expert": expert, "parallel.tensor": tensor}, (f"optimizer={optimizer}", *layers)


def look(reader: Reader | None, wrong: list[str], assembly: Any) -> None:
    """Add to ``wrong`` the pieces of state that are not as they were saved."""
    if reader is not None:
        wrong += [
            f"{piece.field} of {piece.name}"
            for piece in assembly.optimizer.iter_state()
            if not same_bits(piece.tensor, reader.read(*piece[:4]))
        ]


def go_on(rank: int, world: int, folder: str) -> tuple[dict[int, float], dict[int, float], list[str], list[str]]:
    """The losses of the chain and of a run that nobody stopped, what was loaded wrongly, and the experts' tensors."""
    import torch.distributed as dist

    root, losses, wrong = Path(folder), dict[int, float](), list[str]()
    with found_once(), kept_groups():
        for index, (shape, end) in enumerate(zip(CHAIN, ENDS, strict=True)):
            place, before = root / str(index), end - EACH
            if index and rank == 0:
                only_step(root / str(index - 1), before, place)
            dist.barrier()
            saved = Checkpoints(place / "checkpoints")
            reader = Reader(saved.folder(before), saved.manifest(before)) if index else None
            sets, plugins = settings(*shape)
            ran = attempt(
                place,
                sets,
                plugins,
                stop_after=end,
                rank=rank,
                world=world,
                number=1 + bool(index),
                loaded=partial(look, reader, wrong),
            )
            losses |= {step: numbers["loss"] for step, numbers in ran.numbers.items()}
        sets, plugins = settings(*CHAIN[0])
        whole = attempt(root / "whole", sets, plugins, rank=rank, world=world)
        tensors = Checkpoints(root / "0" / "checkpoints").manifest(EACH).tensors
    return losses, {step: each["loss"] for step, each in whole.numbers.items()}, wrong, sorted(tensors)


def test_experts_are_loaded_by_other_numbers_of_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(go_on, 4, str(tmp_path), timeout=280)
    assert [wrong for _, _, wrong, _ in ranks] == [[]] * 4
    losses, whole, _, tensors = ranks[0]
    assert list(losses) == list(whole) == list(range(1, ENDS[-1] + 1))
    np.testing.assert_allclose(list(losses.values()), list(whole.values()), rtol=0, atol=1e-5)
    assert {f"layers.0.moe.experts.output.{expert}.weight" for expert in range(4)} <= set(tensors)
    assert "layers.0.moe.router.expert_bias" in tensors

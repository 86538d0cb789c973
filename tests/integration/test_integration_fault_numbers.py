"""Numbers that are not finite on one rank: all ranks skip the step, as if all had them; a storm of them ends a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_run_engine.checkpoint.step_folder import Checkpoints
from tests.support.forked import Ran, learned, run_forked, saved_bits, tiny
from tests.support.saved_steps import read_all, same_state

pytestmark = pytest.mark.multiproc

LAST = 4
#: Settings and plugins of two ranks that share the work in one way.
SHAPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "replicas": ({}, ()),
    "ZeRO shards": ({}, ("optimizer=zero1",)),
    "stages": ({"parallel.pipeline": 2}, ("schedule=1f1b",)),
    "tensor shards": ({"parallel.tensor": 2}, ("parallel-layer=tensor",)),
}


def run(folder: Path, shape: str, fault: str, **values: Any) -> Ran:
    sets, plugins = SHAPES[shape]
    return run_forked(tiny(folder, {**sets, "checkpoint.interval": 0, **values}, plugins, nproc=2), fault)


#: ZeRO's shards lie on data-parallel ranks too.
RARE = {"replicas": pytest.mark.nightly}


@pytest.mark.parametrize("shape", [pytest.param(shape, marks=RARE.get(shape, ())) for shape in SHAPES])
def test_what_is_not_finite_in_one_shard_alone_skips_the_step_on_all_ranks(shape: str, tmp_path: Path) -> None:
    one, both = tmp_path / "one", tmp_path / "both"
    for folder, rank in ((one, "rank=1,"), (both, "")):
        assert run(folder, shape, f"{rank}step=2,at=optimizer,kind=nan;{rank}step=3,at=backward,kind=inf").code == 0
    rows = learned(one)
    assert [rows[step]["skipped"] for step in sorted(rows)] == [False, True, True, False]
    assert rows[LAST]["skipped_total"] == 2
    assert rows == learned(both)
    assert saved_bits(one, LAST) == saved_bits(both, LAST)


def test_a_storm_ends_the_run_with_advice(tmp_path: Path) -> None:
    stopped = run(tmp_path / "run", "replicas", "rank=1,at=optimizer,kind=nan", **{"train.max_skips": 3})
    assert stopped.code == 6
    assert "3 steps in a row were skipped" in stopped.message
    assert "lower train.lr" in stopped.message


def test_a_bit_that_flips_in_one_replica_ends_the_run_and_names_it(tmp_path: Path) -> None:
    request = tiny(tmp_path / "run", {"guard.replica_interval": 1, "checkpoint.interval": 2}, nproc=4)
    flipped = run_forked(request, "rank=2,step=3,at=observe,kind=flip")
    assert flipped.code == 6
    assert flipped.message.startswith("after step 3 rank 2 holds another embedding.word.weight than ranks 0, 1 and 3: ")
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [2]


def test_a_bit_that_flips_in_a_share_of_zero3_is_seen_where_another_stage_holds_a_copy_and_else_saved(
    tmp_path: Path,
) -> None:
    """Replicas of a share are gathered from it. Of a tied embedding the last stage has shares of its own."""
    whole = {"optimizer.whole_below": 0, "guard.replica_interval": 1}

    def run_zero3(name: str, fault: str, *, tied: bool) -> Ran:
        sets = {"train.steps": LAST, "model.tie_embeddings": tied, "parallel.pipeline": 2, **whole}
        return run_forked(tiny(tmp_path / name, sets, ("schedule=1f1b", "optimizer=zero3"), nproc=4), fault)

    flip = "rank=0,step=2,at=observe,kind=flip"
    seen = run_zero3("seen", flip, tied=True)
    assert seen.code == 6
    assert "after step 2 the copies of embedding.word.weight on ranks 0, 1, 2 and 3 differ" in seen.message
    assert [run_zero3(name, fault, tied=False).code for name, fault in (("unseen", flip), ("intact", ""))] == [0, 0]
    unseen, intact = (Checkpoints(tmp_path / name / "checkpoints") for name in ("unseen", "intact"))
    assert not same_state(*(read_all(each, LAST) for each in (unseen, intact))), "it struck the share"

"""Several ranks of which one goes wrong: a weight that is not equal to its copies, a loss, a rank that is slow."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from megatron_run.contracts import Init, ParamInfo, Part
from megatron_run_engine.training.health.replicas import Difference, _label, content_hash, find_difference
from tests.support.ranks import run_ranks

from .guarded_ranks import FLIPS, all_of_it


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks saw, in one world that is started once."""
    return run_ranks(all_of_it, 4, str(tmp_path_factory.mktemp("ranks")), timeout=100)


def test_the_hash_is_its_formula() -> None:
    values = torch.randn(5000)
    bits = values.view(torch.int32).tolist()
    expected = sum(bit * (2 * index + 1) for index, bit in enumerate(bits)) % 2**64
    assert content_hash(values).item() % 2**64 == expected


def test_the_hash_is_the_same_however_it_is_cut_into_blocks() -> None:
    values = torch.randn(1000)
    assert len({int(content_hash(values, block)) for block in (96, 500, 999, 1000, 4096)}) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_hashing_changes_nothing(dtype: torch.dtype) -> None:
    values = torch.arange(1, 40).to(dtype)
    content_hash(values)
    assert torch.equal(values, torch.arange(1, 40).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_single_bit_and_every_swap_changes_the_hash(dtype: torch.dtype) -> None:
    values = torch.randn(3, 8).to(dtype)
    integers = values.view(torch.int32 if dtype == torch.float32 else torch.int16)
    seen = {int(content_hash(values))}
    width = 8 * values.element_size()
    for index in range(24):
        for bit in range(width):
            flipped = integers.clone().view(-1)
            flipped[index] ^= -(2 ** (width - 1)) if bit == width - 1 else 2**bit
            seen.add(int(content_hash(flipped.view(dtype))))
    assert len(seen) == 1 + 24 * width
    assert content_hash(values.flip(0)) != content_hash(values)


def test_the_first_tensor_that_differs_is_named_with_the_ranks_that_hold_another() -> None:
    same = {"a#0": 1, "b#0": 2, "c#0": 3}
    assert find_difference([same, same, same]) is None
    assert find_difference([same, {**same, "c#0": 9, "b#0": 8}, same]) == Difference("b", (1,), (0, 2), 1)
    assert find_difference([same, {**same, "b#0": 8}]) == Difference("b", (0, 1), (), 0)
    assert find_difference([{"a#0": 1}, {"b#0": 5}, {"a#0": 1}]) is None, "one copy alone equals itself"
    apart = [{"a#0": 1}, {"a#0": 2}, {"a#0": 1}, {"a#0": 2}]
    assert find_difference(apart) == Difference("a", (0, 1, 2, 3), (), 0)


def test_ranks_that_hold_other_experts_or_parts_under_one_name_are_not_compared() -> None:
    def label(part: str, start: int = 0, own: int = 0) -> str:
        return _label(ParamInfo("mlp.weight", (Part(part, (8, 4), range(2), start),), Init("zeros"), True), own)

    assert label("mlp.weight") == label("mlp.weight")
    others = [label("mlp.1.weight"), label("mlp.2.weight"), label("mlp.weight", start=2), label("mlp.weight", own=1)]
    assert len({label("mlp.weight"), *others}) == 5


@pytest.mark.parametrize(
    ("difference", "line"),
    [
        (Difference("a", (1,), (0, 2), 0), "rank 1 holds another a than ranks 0 and 2"),
        (
            Difference("a", (1, 3), (0, 2, 4), 1),
            "ranks 1 and 3 hold another a than ranks 0, 2 and 4, and so does 1 more",
        ),
        (
            Difference("a", (0, 1), (), 2),
            "the copies of a on ranks 0 and 1 differ, and so do 2 more tensors: no copy has a majority",
        ),
    ],
)
def test_a_difference_reads_as_one_line(difference: Difference, line: str) -> None:
    assert str(difference) == line


@pytest.mark.multiproc
def test_every_flipped_replica_is_found_and_named(seen: list[dict[str, Any]]) -> None:
    for trial in range(FLIPS):
        victim = seen[0]["whole"][trial][0]
        _, tensor, _ = seen[victim]["whole"][trial]
        others = tuple(rank for rank in range(4) if rank != victim)
        for each in seen:
            assert each["whole"][trial][2] == Difference(tensor, (victim,), others, 0)


@pytest.mark.multiproc
@pytest.mark.parametrize(("kind", "ranks"), [("copies", {0: (0, 1), 1: (0, 1)}), ("split", {2: (0, 2), 3: (1, 3)})])
def test_a_flipped_copy_of_a_tensor_rank_or_another_stage_is_found(
    seen: list[dict[str, Any]], kind: str, ranks: dict[int, tuple[int, ...]]
) -> None:
    """Of two copies nobody knows which is right: both are named."""
    for trial in range(FLIPS):
        victim = seen[0][kind][trial][0]
        _, tensor, found = seen[victim][kind][trial]
        assert (found.tensor.partition("[")[0], found.ranks, found.agree) == (tensor, ranks[victim], ())


@pytest.mark.multiproc
def test_a_tensor_rank_that_is_fed_other_samples_is_named(seen: list[dict[str, Any]]) -> None:
    for each in seen:
        assert each["fed"].startswith("at step 4 rank 2 holds another batch of samples than ranks 0, 1 and 3")


@pytest.mark.multiproc
def test_equal_replicas_are_left_alone(seen: list[dict[str, Any]]) -> None:
    assert [each["equal"] for each in seen] == [[None, None]] * 4


@pytest.mark.multiproc
def test_all_ranks_skip_and_go_back_alike_where_the_last_stage_alone_knows_the_loss(seen: list[dict[str, Any]]) -> None:
    first = seen[0]
    for each in seen[1:]:
        assert (each["steps"], each["read"], each["progress"]) == (first["steps"], first["read"], first["progress"])
        assert not each["said"]
    assert first["said"][0] == (
        "step 2 is skipped: the loss lm is -inf, first seen by rank 3 (stage 1) in microbatch 2; all weights are finite"
    )
    assert "back to step 8, past the samples 64 to 87" in first["said"]
    assert [step for step, skipped in first["steps"] if skipped] == [2, 11]
    assert [step for step, _ in first["steps"]] == [*range(1, 12), *range(9, 13)]
    assert first["progress"]["dropped"] == 24


@pytest.mark.multiproc
def test_the_rank_that_holds_the_others_up_is_named_with_the_section(seen: list[dict[str, Any]]) -> None:
    (line,) = seen[0]["stragglers"]
    times = r"it takes ([\d.e+]+) ms a step, the others that do the same ([\d.e+]+) ms"
    found = re.fullmatch(f"rank 2 holds the others up in forward: {times}", line)
    assert found, line
    assert float(found[1]) > 100
    assert not any(each["stragglers"] for each in seen[1:])

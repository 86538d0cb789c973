"""The counter of live bytes, by which both the planner's count and the measurement beside it are taken."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_run_engine.estimate.step_memory import LiveBytes
from tests.support.live_bytes import peak_of

#: Bytes of 1000 values in fp32.
SIZE = 4000


def test_what_operators_make_is_counted_by_its_storage_while_it_exists() -> None:
    given = torch.zeros(1000)
    with LiveBytes() as live:
        given.view(10, 100).add_(1)  # of others, in place
        assert (live.now, live.peak) == (0, 0)
        made = given + 1
        part = made.view(10, 100)[3:5]  # counts as the whole, once
        made.mul_(2)
        assert (live.now, live.peak) == (SIZE, SIZE)
        other = made.double()
        assert (live.now, live.peak) == (3 * SIZE, 3 * SIZE)
        del other
        assert (live.now, live.peak) == (SIZE, 3 * SIZE)
        del made
        assert live.now == SIZE, "a view keeps all of it"
        del part
        assert live.now == 0
        without_values = torch.empty(10 * SIZE, device="meta")
        assert (live.now, live.peak) == (0, 3 * SIZE)
    assert without_values.is_meta


def test_gaps_between_values_count() -> None:
    with LiveBytes() as live:
        spread = torch.empty_strided((10,), (100,))
        assert live.now == (9 * 100 + 1) * spread.itemsize


def test_a_tensor_in_the_place_of_a_freed_one_is_counted_in_its_stead() -> None:
    with LiveBytes() as live:
        for _ in range(3):
            torch.zeros(1000)
        assert live.now == 0
    assert live.peak == SIZE


def test_a_work_is_charged_with_what_it_takes_beyond_what_was_there() -> None:
    with LiveBytes() as live:
        before = torch.zeros(1000)
        result, above = live.above(lambda: (before + 1) * 2)
        assert above == 2 * SIZE
        assert live.now == 2 * SIZE
    assert result[0] == 2


def test_of_a_mapped_file_a_copy_alone_is_made(tmp_path: Path) -> None:
    file = tmp_path / "values"
    file.write_bytes(bytes(SIZE))

    def mapped() -> torch.Tensor:
        return torch.from_file(str(file), size=1000)

    assert peak_of(lambda: mapped()[10:20]) == 0
    assert peak_of(lambda: mapped().clone()) == SIZE
    with LiveBytes() as live:
        mapped()
    assert live.peak == SIZE, "a plan's counter leaves out no operator"

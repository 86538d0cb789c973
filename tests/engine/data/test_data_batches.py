"""Fields of a batch: the right samples, in order, as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from megatron_run.errors import DataError
from megatron_run_engine.data.batches import SampleStream, fields, sample_index

CPU = torch.device("cpu")
DATASET = [
    {"tokens": np.full(4, index), "labels": np.full(4, -index), "loss_mask": np.ones(4, np.float32)}
    for index in range(5)
]


def test_fields_are_stacked_in_the_order_of_the_indices() -> None:
    found = fields(DATASET, [3, 0, 3], ("tokens", "loss_mask"), CPU)
    assert list(found) == ["tokens", "loss_mask"]
    assert found["tokens"].tolist() == [[3] * 4, [0] * 4, [3] * 4]
    assert found["tokens"].dtype == torch.int64
    assert found["loss_mask"].dtype == torch.float32


def test_the_tensors_are_copies_of_the_data() -> None:
    fields(DATASET, [1], ("tokens",), CPU)["tokens"].zero_()
    assert DATASET[1]["tokens"].tolist() == [1, 1, 1, 1]


class Samples(list[Any]):
    """Samples that a run shuffles."""

    in_order = False


class Buffered(list[Any]):
    """Every sample in the same arrays."""

    def __init__(self, samples: Iterable[Mapping[str, Any]]) -> None:
        super().__init__(samples)
        self._buffers = {name: np.empty_like(value) for name, value in super().__getitem__(0).items()}

    def __getitem__(self, index: Any) -> Any:
        for name, value in super().__getitem__(index).items():
            self._buffers[name][:] = value
        return self._buffers


def test_a_sample_is_copied_before_the_next_is_read() -> None:
    found = fields(Buffered(DATASET), [3, 0, 4], ("tokens", "labels"), CPU)
    assert found["tokens"].tolist() == [[3] * 4, [0] * 4, [4] * 4]
    assert found["labels"].tolist() == [[-3] * 4, [0] * 4, [-4] * 4]


def test_a_field_of_one_number_is_a_column() -> None:
    assert fields([{"label": np.array(3)}, {"label": np.array(4)}], [0, 1], ("label",), CPU)["label"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("second", "forms"),
    [
        (np.ones(1, np.float32), r"float32 \[1\] and float32 \[4\]"),
        (np.ones(5, np.float32), r"float32 \[4\] and float32 \[5\]"),
        (np.ones(4), r"float32 \[4\] and float64 \[4\]"),
        (np.ones(4, np.float16), r"float16 \[4\] and float32 \[4\]"),
    ],
)
def test_a_field_of_two_forms_in_one_batch_is_named(second: Any, forms: str) -> None:
    samples = [DATASET[0], {**DATASET[1], "loss_mask": second}]
    with pytest.raises(DataError, match=f"the field 'loss_mask' is {forms} in samples of one batch"):
        fields(samples, [0, 1], ("tokens", "loss_mask"), CPU)


def test_a_stage_that_needs_no_field_reads_nothing() -> None:
    assert fields([], [7], (), CPU) == {}


def test_a_field_that_the_data_lacks_is_named() -> None:
    with pytest.raises(DataError, match=r"no field 'positions': its samples hold labels, loss_mask, tokens"):
        fields(DATASET, [0], ("tokens", "positions"), CPU)
    with pytest.raises(DataError, match=r"no field 'positions': its samples hold labels, loss_mask, tokens"):
        fields([{**DATASET[0], "positions": np.arange(4)}, DATASET[1]], [0, 1], ("tokens", "positions"), CPU)


def test_a_stream_follows_the_sampler_over_the_end_of_an_epoch() -> None:
    stream = SampleStream(Samples(DATASET), seed=11)
    found = stream.fields(range(3, 9), ("tokens",), CPU)["tokens"][:, 0].tolist()
    assert found == [sample_index(5, 11, position) for position in range(3, 9)]


class Ordered(Samples):
    """Samples in the order of the run."""

    in_order = True


def test_data_with_an_order_of_its_own_is_read_by_position() -> None:
    found = SampleStream(Ordered(DATASET), seed=11).fields([3, 0, 4], ("tokens",), CPU)["tokens"]
    assert found.tolist() == [DATASET[index]["tokens"].tolist() for index in (3, 0, 4)]

"""An import, and a model that is loaded, take no more memory than what they make: files are read where they lie."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.importing.llama import write_llama
from megatron_run_engine.checkpoint import shard_file
from megatron_run_engine.formats.convert import import_model
from megatron_run_inference import load
from megatron_run_inference.source import find_source
from tests.support.live_bytes import peak_of

#: 11 million parameters, of which a tensor is at most a tenth.
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 9, "vocab_size": 4000}
#: So many bytes are converted, hashed and written at once: the writer's block, the blocks that wait to be hashed, and
#: one that is hashed and that its thread still holds for a moment.
WRITING = 7 << 22


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A random Llama in bf16, and the number of its parameters."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    return folder, write_llama(folder, SIZES)


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_loading_takes_at_most_a_fifth_more_than_the_parameters(
    llama: tuple[Path, int], precision: str, width: int
) -> None:
    folder, parameters = llama
    peak = peak_of(lambda: load(folder, device="cpu", sets={"train.precision": precision}))
    assert parameters * width <= peak <= 1.2 * parameters * width


def test_a_rank_reads_its_box_of_a_tensor_alone(llama: tuple[Path, int]) -> None:
    source, box = find_source(llama[0]), ("embedding.word.weight", (2000, 128), (2000, 128))
    assert peak_of(lambda: source.read(*box)) == 0, "it is a view of the mapped file"
    whole = source.read(box[0], (0, 0), (4000, 256))
    assert torch.equal(source.read(*box), whole[2000:, 128:])


@pytest.mark.parametrize("pause", [0.0, 0.05], ids=["as it comes", "all that may wait waits"])
def test_an_import_holds_blocks_and_not_the_model(
    llama: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    def hash_late(totals: Iterable[Any], batch: Sequence[memoryview]) -> None:
        time.sleep(pause)
        hash_now(totals, batch)

    hash_now = shard_file._hash
    monkeypatch.setattr(shard_file, "_hash", hash_late)
    folder, parameters = llama
    peak = peak_of(lambda: import_model(folder, tmp_path / "ours"))
    assert peak <= WRITING < 0.7 * 4 * parameters

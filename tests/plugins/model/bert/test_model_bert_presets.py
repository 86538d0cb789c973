"""The presets of table 4 of the Megatron-LM paper: sizes, counts of parameters, GPUs, and the recipe of section 4.2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_run.planning import load_config
from megatron_run_cli.reports import dry_run
from megatron_run_cli.reports.dry_run import dry_run_text
from megatron_run_engine.data.indexed_files import IndexedWriter
from megatron_run_engine.estimate.model_size import model_size

#: Layers, width, heads, parameters as printed and their unit, tensor ranks, all GPUs, steps.
TABLE = {
    "bert-336m": (24, 1024, 16, 336e6, 1e6, 1, 128, 2_000_000),
    "bert-1.3b": (24, 2048, 32, 1.3e9, 1e8, 2, 256, 2_000_000),
    "bert-3.9b": (48, 2560, 40, 3.9e9, 1e8, 8, 512, 1_500_000),
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the presets name."""
    (tmp_path / "data").mkdir()
    with IndexedWriter(tmp_path / "data" / "bert", np.uint16) as writer:
        for _ in range(100):
            writer.add([5] * 30)
            writer.end_document()
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word"]) + "\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", TABLE)
def test_a_preset_of_table_4_has_its_size_and_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "_step_memory", lambda *_: None)  # seconds, for what nobody reads
    layers, h, heads, printed, unit, tensor, ranks, steps = TABLE[name]
    run = load_config(f"preset:{name}")
    options, train = run.one("model").options, run.config.train
    assert (options.num_layers, options.hidden_size, options.num_heads) == (layers, h, heads)  # type: ignore[union-attr]
    assert h // heads == 64
    assert (run.sizes.tensor, run.sizes.world) == (tensor, ranks)

    layer = 12 * h**2 + 13 * h
    ends = (30522 + 512 + 2) * h + 2 * h  # embeddings, and the last norm
    masked, order = h**2 + h + 2 * h + 30522, h**2 + h + 2 * h + 2
    size = model_size(run)
    assert size.parameters == layers * layer + ends + masked + order
    assert round(size.parameters / unit) == round(printed / unit)
    assert f"parameters of the model: {size.parameters:,}\n" in dry_run_text(run)

    assert (train.precision, train.lr, train.lr_shape, str(train.lr_warmup)) == ("fp16", 1e-4, "linear", "10000")
    assert (train.steps, train.global_batch_size, train.sequence_length) == (steps, 1024, 512)
    assert (train.weight_decay, train.clip_norm, options.norm.order) == (0.01, 1.0, "pre")  # type: ignore[union-attr]
    assert str(train.lr_decay) == ("2000000" if name == "bert-3.9b" else "100%")

"""An imported folder is a configuration and one saved step, written as a run's; or it is not there."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_run.config.values import nested
from megatron_run.config.yaml import bare, parse
from megatron_run.contracts import Weights
from megatron_run.errors import CheckpointError, InputError
from megatron_run_engine.checkpoint.files import FileSystem, NewFile
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.formats.convert import new_folder, read_step, write_folder
from megatron_run_engine.formats.gpt_tensors import logical_shapes
from tests.support.live_bytes import peak_of
from tests.support.small_models import LENGTH, LLAMA, options_of


def random_weights(step: int = 3) -> Weights:
    """Random values for every tensor, with one moment and a counter."""
    generator = torch.Generator().manual_seed(1)
    shapes = logical_shapes(options_of(LLAMA), LENGTH)
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def read(name: str) -> Tensor:
        return values[name]

    readers = {name: partial(read, name) for name in values}
    steps = {name: partial(torch.tensor, 3.0) for name in values}
    return Weights(nested(LLAMA), readers, step, LENGTH, moments={"exp_avg": readers, "step": steps})


def test_every_bit_arrives_in_parts_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_run_engine.formats.convert.PART", 10_000)
    weights = random_weights()
    manifest = write_folder(weights, tmp_path / "ours", "somewhere")
    assert len(manifest.files) > 3
    assert all(file.bytes < 24_000 for file in manifest.files.values()), "header included"
    found = read_step(Checkpoints(tmp_path / "ours" / "checkpoints"), 3)
    assert (found.step, found.sequence_length) == (3, LENGTH)
    assert found.tensors.keys() == weights.tensors.keys()
    assert all(torch.equal(found.tensors[name](), read()) for name, read in weights.tensors.items())
    assert found.moments.keys() == {"exp_avg", "step"}
    assert all(torch.equal(found.moments["exp_avg"][name](), read()) for name, read in weights.tensors.items())
    assert {found.moments["step"][name]().item() for name in weights.tensors} == {3.0}


def test_the_configuration_says_the_whole_model(tmp_path: Path) -> None:
    write_folder(random_weights(), tmp_path / "ours", "huggingface: a\nb: 1")
    text = (tmp_path / "ours" / "config.yaml").read_text()
    said = {name: bare(node) for name, node in parse(text, "config.yaml").items()}
    assert said["train"] == {"sequence_length": LENGTH}
    assert said["model"] == nested({"use": "gpt", **LLAMA})
    identity = Checkpoints(tmp_path / "ours" / "checkpoints").manifest(3).about.identity
    assert identity["model.dropout"] == options_of(LLAMA).dropout, "the step says the defaults too"
    assert (identity["model.rope.theta"], identity["model.experts.router.groups"]) == (500.0, 1)
    assert "model.rope" not in identity


def test_nothing_is_overwritten_and_nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights()
    write_folder(weights, tmp_path / "ours", "x")
    before = {path: path.read_bytes() for path in (tmp_path / "ours").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="exists: nothing is overwritten"):
        write_folder(weights, tmp_path / "ours", "x")
    assert before == {path: path.read_bytes() for path in (tmp_path / "ours").rglob("*") if path.is_file()}

    def full(files: FileSystem, path: Path) -> NewFile:
        if path.suffix == ".safetensors":
            raise OSError(28, "No space left on device", str(path))
        return NewFile(path)

    monkeypatch.setattr(FileSystem, "create", full)
    with pytest.raises(CheckpointError, match=r"other could not be written: No space left.*part-00000"):
        write_folder(weights, tmp_path / "other", "x")
    assert not (tmp_path / "other").exists()


def test_folders_around_a_new_one_go_with_it_but_for_those_that_others_use(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()

    folder = tmp_path / "mine" / "a" / "b" / "new"

    def use(*written: Path) -> None:
        with new_folder(folder) as hidden:
            for path in (hidden / "half", *written):
                path.write_text("something")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    assert [entry.name for entry in tmp_path.rglob("*")] == ["mine"]
    with pytest.raises(KeyboardInterrupt):
        use(tmp_path / "mine" / "a" / "of somebody else")
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["a", "mine", "of somebody else"]


@pytest.mark.parametrize("wrong", ["missing", "shape", "type"])
def test_a_source_that_is_no_whole_model_is_refused(wrong: str, tmp_path: Path) -> None:
    weights = random_weights()
    name = "layers.1.mlp.output.weight"
    tensors = dict(weights.tensors)
    value = tensors.pop(name)()
    if wrong != "missing":
        tensors[name] = lambda: value.t() if wrong == "shape" else value.double()
    with pytest.raises(CheckpointError, match=name):
        write_folder(Weights(nested(LLAMA), tensors, sequence_length=LENGTH), tmp_path / "ours", "x")
    assert not (tmp_path / "ours").exists()


def test_what_readers_make_is_freed_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_run_engine.formats.convert.PART", 4 << 20)
    readers = {f"a.{number}": partial(torch.ones, 1 << 16) for number in range(64)}  # 16 MiB
    weights = Weights({"use": "somebody:else"}, readers)
    peak = peak_of(lambda: write_folder(weights, tmp_path / "ours", "somewhere"))
    assert 4 << 20 <= peak <= 1.5 * (4 << 20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_become_fp32_masters(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    half = torch.randn(7, 600_000, generator=generator).to(dtype).t()  # more than a block, and not contiguous
    half[0, 0], half[-1, 3] = float("inf"), float("nan")
    bad = Counter[str]()
    weights = Weights({"use": "somebody:else"}, {"a": lambda: half, "b": lambda: half[:5, 0]})
    manifest = write_folder(weights, tmp_path / "ours", "somewhere", bad)
    found = read_step(Checkpoints(tmp_path / "ours" / "checkpoints"), 0).tensors
    assert manifest.tensors["a"]["master"].dtype == "F32"
    assert torch.equal(found["a"]().nan_to_num(nan=-1), half.float().nan_to_num(nan=-1))
    assert torch.equal(found["b"](), half[:5, 0].float())
    assert bad == {"a": 2, "b": 1}

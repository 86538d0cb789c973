"""Folders of torch.distributed.checkpoint: torch reads ours, we read ours back, and nothing is read without trust."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.data.standalone_tokenizer import byte_tokenizer_json
from megatron_run_engine.formats import convert
from megatron_run_engine.formats.convert import read_step
from megatron_run_format_distributed import SIDECAR
from megatron_run_testing.build_contexts import logical_values
from tests.support.small_models import LLAMA, saved_network

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def exported(path: Path) -> Path:
    """A run of one step with moments at ``path / run``, and its export."""
    saved_network(path / "run", LLAMA, moments=True)
    convert.export_model(path / "run", path / "dcp", "distributed")
    return path / "dcp"


def test_torch_loads_masters_and_moments(tmp_path: Path) -> None:
    built, _ = saved_network(tmp_path / "run", LLAMA, moments=True)
    convert.export_model(tmp_path / "run", tmp_path / "dcp", "distributed")
    values = logical_values(built.infos)
    empty = {name: torch.empty_like(tensor) for name, tensor in values.items()}
    state: dict[str, Any] = {
        "model": dict(empty),
        "optimizer": {
            "exp_avg": {name: torch.empty_like(tensor) for name, tensor in values.items()},
            "step": {name: torch.tensor(0.0) for name in values},
        },
    }
    load(state, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in values.items())
    assert all(torch.equal(state["optimizer"]["exp_avg"][name], 2 * tensor) for name, tensor in values.items())
    assert {tensor.item() for tensor in state["optimizer"]["step"].values()} == {7.0}


def test_there_and_back_no_bit_changes(tmp_path: Path) -> None:
    done = convert.import_model(exported(tmp_path), tmp_path / "back", trust_pickle=True)
    assert (done.format, done.step, done.moments) == ("distributed", 7, ("exp_avg", "step"))
    first, second = (read_step(Checkpoints(tmp_path / name / "checkpoints"), 7) for name in ("run", "back"))
    assert (first.config, first.sequence_length) == (second.config, second.sequence_length)
    assert first.moments.keys() == second.moments.keys()
    for one, other in (
        (first.tensors, second.tensors),
        *((first.moments[f], second.moments[f]) for f in first.moments),
    ):
        assert one.keys() == other.keys()
        assert all(torch.equal(read(), other[name]()) for name, read in one.items())


def test_the_tokenizer_travels_with_its_chat_template(tmp_path: Path) -> None:
    saved_network(tmp_path / "run", LLAMA)
    beside = {"tokenizer.json": byte_tokenizer_json(), "chat_template.jinja": b"{{ messages }}"}
    for name, content in beside.items():
        (tmp_path / "run" / name).write_bytes(content)
    convert.export_model(tmp_path / "run", tmp_path / "dcp", "distributed")
    convert.import_model(tmp_path / "dcp", tmp_path / "back", trust_pickle=True)
    assert {name: (tmp_path / "back" / name).read_bytes() for name in beside} == beside
    tokenizer = tmp_path / "back" / "tokenizer.json"
    assert f"data:\n  use: text\n  tokenizer: {tokenizer}\n" in (tmp_path / "back" / "config.yaml").read_text()
    assert read_step(Checkpoints(tmp_path / "back" / "checkpoints"), 7).tokenizer == tokenizer


class Trap:
    """Makes a file named in its pickle when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", [None, "distributed"])
def test_without_trust_nothing_is_executed(name: str | None, tmp_path: Path) -> None:
    folder = exported(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(CheckpointError, match=r"with pickle, which executes.*--trust-pickle"):
        convert.import_model(folder, tmp_path / "ours", name)
    assert not (tmp_path / "sprung").exists()
    with pytest.raises(CheckpointError, match=r"metadata cannot be read"):
        convert.import_model(folder, tmp_path / "ours", name, trust_pickle=True)
    assert (tmp_path / "sprung").exists(), "the trap works: trust is what it takes"
    assert not (tmp_path / "ours").exists()


def test_a_folder_of_others_or_a_broken_one_is_refused(tmp_path: Path) -> None:
    save({"net": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=r"megatron-run.json cannot be read"):
        convert.import_model(tmp_path / "theirs", tmp_path / "ours", "distributed", trust_pickle=True)
    folder = exported(tmp_path)
    said = (folder / SIDECAR).read_text()
    (tmp_path / "theirs" / SIDECAR).write_text(said)
    with pytest.raises(CheckpointError, match=r"holds 'net.weight'.*not exported by megatron-run"):
        convert.import_model(tmp_path / "theirs", tmp_path / "ours", trust_pickle=True)
    (folder / SIDECAR).write_text(json.dumps({**json.loads(said), "step": "x"}))
    with pytest.raises(CheckpointError, match=r"megatron-run.json cannot be used"):
        convert.import_model(folder, tmp_path / "ours", trust_pickle=True)
    (folder / SIDECAR).write_text(said)
    data = next(folder.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"cannot be read from"):
        convert.import_model(folder, tmp_path / "ours", trust_pickle=True)
    assert not (tmp_path / "ours").exists()

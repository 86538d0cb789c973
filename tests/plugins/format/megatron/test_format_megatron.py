"""Checkpoints of Megatron-LM: older names and layouts, what cannot be had here, what is damaged.

The layouts themselves are compared with megatron-core in the file beside this one.
"""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_run.errors import CheckpointError, RunError
from megatron_run_engine.formats.convert import write_folder
from megatron_run_engine.formats.gpt_tensors import gpt_options, logical_shapes
from megatron_run_format_megatron import import_checkpoint
from tests.support.megatron_checkpoints import GPT, LENGTH, LLAMA, MIXTURE, PADDED, random_state, save_sharded

STATE = random_state(GPT)
#: What a name was before megatron-core's.
OLD_NAMES = (
    ("self_attention.linear_qkv", "self_attention.query_key_value"),
    ("self_attention.linear_proj", "self_attention.dense"),
    ("pre_mlp_layernorm", "post_attention_layernorm"),
    ("linear_fc1", "dense_h_to_4h"),
    ("linear_fc2", "dense_4h_to_h"),
)
OLDER_NAMES = (
    *((new, old.replace("self_attention.", "attention.")) for new, old in OLD_NAMES),
    ("post_attention_layernorm", "post_attention_norm"),
    ("input_layernorm", "input_norm"),
    ("final_layernorm", "final_norm"),
)


def tensors(folder: Path) -> dict[str, Tensor]:
    """All that is read from ``folder``, values too."""
    return {name: read() for name, read in import_checkpoint.read(folder).tensors.items()}


@pytest.fixture(scope="module")
def modern(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("modern")
    save_sharded(STATE, GPT, folder, 3)
    return tensors(folder)


def equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def write_state(folder: Path, model: Any, **more: Any) -> None:
    """One rank's file with ``model`` in it, and the folder's word on the newest step."""
    home = folder / "iter_0000003" / "mp_rank_00"
    home.mkdir(parents=True, exist_ok=True)
    state = {"args": Namespace(**GPT), "checkpoint_version": 3.0, "iteration": 3, "model": model, **more}
    torch.save(state, home / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("3\n")


@pytest.mark.parametrize(("encoder", "names"), [("encoder", OLD_NAMES), ("transformer", OLDER_NAMES)])
def test_older_names_are_the_same_model(
    encoder: str, names: tuple[tuple[str, str], ...], modern: dict[str, Tensor], tmp_path: Path
) -> None:
    inner: dict[str, Tensor] = {}
    for name, tensor in STATE.items():
        for new, old in names:
            name = name.replace(new, old)  # noqa: PLW2901  # the name as it was
        inner[name] = tensor
    words, places = (inner.pop(f"embedding.{kind}_embeddings.weight") for kind in ("word", "position"))
    embedding = {"word_embeddings": {"weight": words}, "position_embeddings": {"weight": places}}
    layers = {name.removeprefix("decoder."): tensor for name, tensor in inner.items()}
    model = {"language_model": {"embedding": embedding, encoder: layers}, "word_embeddings_for_head": {"weight": words}}
    write_state(tmp_path, model)
    assert equal(tensors(tmp_path), modern)


def test_another_head_than_the_tied_one_is_kept_and_said(modern: dict[str, Tensor], tmp_path: Path) -> None:
    words = STATE["embedding.word_embeddings.weight"]
    padding = torch.arange(PADDED)[:, None] >= 61
    for name, head, notes in (("same", words, 0), ("padded", words + padding, 0), ("other", words + 1, 1)):
        write_state(tmp_path / name, {**STATE, "output_layer.weight": head})
        found = import_checkpoint.read(tmp_path / name)
        assert sum("differs from the word embedding and is kept" in note for note in found.notes) == notes, name
        here = tensors(tmp_path / name)
        own = here.pop("output.weight", None)
        assert equal(here, modern)
        assert (own is not None) == bool(notes) == (found.config["tie_embeddings"] is False)
        assert own is None or torch.equal(own, head[: len(own)])


def test_norms_may_be_fused_with_the_layer_after_them(modern: dict[str, Tensor], tmp_path: Path) -> None:
    fused = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    state = {}
    for name, tensor in STATE.items():
        for alone, inside in fused.items():
            name = name.replace(alone, inside)  # noqa: PLW2901  # the name that Transformer Engine's layers give
        state[name] = tensor
    state["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(4, dtype=torch.uint8)
    write_state(tmp_path, state)
    assert equal(tensors(tmp_path), modern)


def test_experts_may_be_tensors_of_one_layer(tmp_path: Path) -> None:
    state = random_state(MIXTURE)
    names = {name: re.sub(r"local_experts\.(\d)\.(linear_fc.)\.weight", r"\2.weight\1", name) for name in state}
    assert len(set(names.values()) - set(state)) == 2 * 4 * 2
    write_state(tmp_path / "alone", state, args=Namespace(**MIXTURE))
    write_state(tmp_path / "one", {names[name]: state[name] for name in state}, args=Namespace(**MIXTURE))
    assert equal(tensors(tmp_path / "one"), tensors(tmp_path / "alone"))
    weights = import_checkpoint.read(tmp_path / "one")
    assert gpt_options(weights).explicit()["experts.layer_pattern"][:3] == (1, 0, 1)
    write_folder(weights, tmp_path / "ours", "theirs")


def test_norms_that_are_kept_minus_one(modern: dict[str, Tensor], tmp_path: Path) -> None:
    state = {name: tensor - 1 if "norm.weight" in name else tensor for name, tensor in STATE.items()}
    write_state(tmp_path, state, args=Namespace(**GPT, apply_layernorm_1p=True))
    found = tensors(tmp_path)
    for name, tensor in modern.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)


def write_distributed(folder: Path, state: Mapping[str, Tensor], **arguments: Any) -> None:
    """As torch.distributed.checkpoint writes it, without megatron-core."""
    with pytest.warns(UserWarning, match="assuming the intent"):
        save(dict(state), storage_writer=FileSystemWriter(folder), no_dist=True)
    torch.save({"args": Namespace(**GPT, **arguments), "iteration": 5}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))


def test_chunks_of_layers_that_lie_one_by_one_or_stacked(modern: dict[str, Tensor], tmp_path: Path) -> None:
    stacked: dict[str, list[Tensor]] = {}
    for name, tensor in STATE.items():
        words = name.split(".")
        key = ".".join(word for word in words if not word.isdecimal())
        stacked.setdefault(key, []).append(tensor)
    whole = {key: torch.stack(each) if ".layers." in key else each[0] for key, each in stacked.items()}
    for folder, state in ((tmp_path / "stacked", whole), (tmp_path / "alone", STATE)):
        write_distributed(folder, state)
        assert equal(tensors(folder), modern)
        assert import_checkpoint.read(folder).step == 5


@pytest.mark.parametrize("prefix", ["fp32_param", "param"])
def test_masters_are_taken_where_they_lie_as_the_weights_do(
    prefix: str, modern: dict[str, Tensor], tmp_path: Path
) -> None:
    state = {name: tensor.bfloat16() for name, tensor in STATE.items()}
    write_distributed(tmp_path / "rounded", state, bf16=True)
    assert not equal(tensors(tmp_path / "rounded"), modern)
    assert len(import_checkpoint.read(tmp_path / "rounded").notes) == 1
    state |= {f"optimizer.state.{prefix}.{name}": tensor for name, tensor in STATE.items()}
    state |= {f"optimizer.state.exp_avg.{name}": tensor * 0 for name, tensor in STATE.items()}
    write_distributed(tmp_path / "exact", state, bf16=True)
    assert equal(tensors(tmp_path / "exact"), modern)
    assert import_checkpoint.read(tmp_path / "exact").notes == ()


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "common.pt", "metadata.json"])
def test_a_damaged_file_is_one_line(file: str, tmp_path: Path) -> None:
    write_distributed(tmp_path, STATE)
    content = (tmp_path / file).read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"[" * 9):
        (tmp_path / file).write_bytes(damaged)
        with pytest.raises(CheckpointError) as caught:
            tensors(tmp_path)
        assert file in str(caught.value)
        assert "\n" not in str(caught.value)


def test_an_import_is_a_step_of_ours(tmp_path: Path) -> None:
    save_sharded(STATE, {**GPT, "tensor_model_parallel_size": 2, "bf16": True}, tmp_path / "theirs", 3)
    weights = import_checkpoint.read(tmp_path / "theirs")
    manifest = write_folder(weights, tmp_path / "ours", "theirs")
    assert manifest.about.step == 3
    assert manifest.tensors.keys() == logical_shapes(gpt_options(weights), LENGTH).keys()
    assert any("the optimizer's fp32 values are not taken" in note for note in weights.notes)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"multi_latent_attention": True}, "--multi-latent-attention: no tensors of latents are read"),
        ({"moe_apply_probs_on_input": True}, "--moe-apply-probs-on-input: an expert's output is weighed"),
        ({"qk_l2_norm": True, "rope_type": "yarn"}, "--rope-type yarn: only latent attention"),
        ({"window_size": (4, 2)}, "--window-size with 2 later tokens"),
        ({"num_query_groups": 3, "group_query_attention": True}, "4 heads in 3 groups"),
    ],
)
def test_a_network_that_cannot_be_had_is_refused(arguments: dict[str, Any], why: str, tmp_path: Path) -> None:
    write_state(tmp_path, STATE, args=Namespace(**{**GPT, **arguments}))
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint.read(tmp_path)
    assert why in str(caught.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("arguments", [{"num_layers": 1 << 20}, {"num_layers": 10**9}, {"num_experts": 1 << 20}])
def test_more_layers_or_experts_than_the_files_hold_are_refused_at_once(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    write_state(tmp_path, STATE, args=Namespace(**{**GPT, **arguments}))
    with pytest.raises(RunError) as caught:
        write_folder(import_checkpoint.read(tmp_path), tmp_path / "ours", "theirs")
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(20)
def test_a_stack_of_more_layers_than_there_are_values_is_refused_at_once(tmp_path: Path) -> None:
    stacked = torch.zeros((1 << 40, 0))
    write_distributed(tmp_path, {"decoder.layers.mlp.linear_fc2.bias": stacked})
    with pytest.raises(CheckpointError, match="stacks"):
        import_checkpoint.read(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_attention_heads": "four"},
        {"tensor_model_parallel_size": 1 << 40},
        {"num_experts": -1},
        {"num_experts": 2, "moe_layer_freq": [3]},
        {"kv_channels": Path("/")},
    ],
)
def test_arguments_that_make_no_sense_are_one_line(arguments: dict[str, Any], tmp_path: Path) -> None:
    write_state(tmp_path, STATE, args=Namespace(**{**GPT, **arguments}))
    with pytest.raises(CheckpointError, match=r"the arguments in .* are damaged") as caught:
        write_folder(import_checkpoint.read(tmp_path), tmp_path / "ours", "theirs")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("network", "longest"), [(GPT, 2 * LENGTH), (LLAMA, LENGTH)], ids=["learned", "rotated"])
def test_the_table_of_learned_positions_is_the_longest_sequence(
    network: Mapping[str, Any], longest: int, tmp_path: Path
) -> None:
    given = {**network, "max_position_embeddings": 2 * LENGTH}
    write_state(tmp_path, random_state(given), args=Namespace(**given))
    assert import_checkpoint.read(tmp_path).sequence_length == longest


def test_without_a_word_on_the_vocabulary_it_is_the_embedding(tmp_path: Path) -> None:
    silent = {name: value for name, value in GPT.items() if "vocab" not in name}
    write_state(tmp_path, STATE, args=Namespace(**silent))
    weights = import_checkpoint.read(tmp_path)
    assert weights.config["vocab_size"] == len(weights.tensors["embedding.word.weight"]()) == PADDED
    assert any("with its padding" in note for note in weights.notes)


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    given = {**GPT, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    save_sharded(STATE, given, tmp_path, 3)
    step = tmp_path / "iter_0000003"
    shutil.copy(step / "mp_rank_00_000" / "model_optim_rng.pt", step / "mp_rank_01_001" / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match="do not belong together"):
        import_checkpoint.read(tmp_path)
    shutil.rmtree(step / "mp_rank_01_001")
    with pytest.raises(CheckpointError, match="mp_rank_01_001"):
        import_checkpoint.read(tmp_path)
    for left in step.glob("mp_rank_00*"):
        shutil.rmtree(left)
    with pytest.raises(CheckpointError, match="mp_rank_00"):
        import_checkpoint.read(tmp_path)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"model": {**STATE, "decoder.layers.0.self_attention.gate.weight": torch.ones(6)}}, "does not have"),
        ({"checkpoint_version": 1.0}, "is too old"),
        ({"args": None}, "no arguments were saved"),
        ({"model": 3}, "its files hold at most 0"),
    ],
)
def test_what_is_no_checkpoint_of_a_gpt_is_refused(more: dict[str, Any], why: str, tmp_path: Path) -> None:
    write_state(tmp_path, STATE, **({} if "model" in more else more))
    if "model" in more:
        write_state(tmp_path, more["model"])
    with pytest.raises(CheckpointError, match=why):
        write_folder(import_checkpoint.read(tmp_path), tmp_path / "ours", "theirs")


@pytest.mark.parametrize(
    ("word", "why"),
    [("4", "says that it is the newest"), ("../../x", "is no number of a step"), ("", "is no number of a step")],
)
def test_a_word_on_the_newest_step_that_is_wrong(word: str, why: str, tmp_path: Path) -> None:
    write_state(tmp_path, STATE)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(word)
    with pytest.raises(CheckpointError, match=why):
        import_checkpoint.read(tmp_path)


def test_folders_are_recognised_by_their_files(tmp_path: Path) -> None:
    write_state(tmp_path, STATE)
    assert import_checkpoint.is_checkpoint(tmp_path)
    assert import_checkpoint.is_checkpoint(tmp_path / "iter_0000003")
    assert not import_checkpoint.is_checkpoint(tmp_path / "iter_0000003" / "mp_rank_00")
    with pytest.raises(CheckpointError, match="holds no checkpoint of Megatron"):
        import_checkpoint.read(tmp_path / "iter_0000003" / "mp_rank_00")

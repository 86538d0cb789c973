"""Importing a checkpoint of Megatron-LM, whether its ranks wrote a file each or ``torch_dist``."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from megatron_run.config.values import nested
from megatron_run.contracts import Weights
from megatron_run.errors import CheckpointError, InputError
from megatron_run_engine.checkpoint import read_whole
from megatron_run_format_megatron.launch_script.attention_section import is_latent, is_rotated
from megatron_run_format_megatron.launch_script.data_section import WITH_PADDING, find_vocabulary
from megatron_run_format_megatron.launch_script.model_section import experts, network, network_faults
from megatron_run_format_megatron.launch_script.settings import Setting
from megatron_run_format_megatron.rank_files import Found, count_of, is_sharded, read_shards
from megatron_run_format_megatron.tensor_names import Network, our_tensors
from megatron_run_format_megatron.torch_dist import is_distributed, read_distributed

#: The file that names the newest step.
LATEST = "latest_checkpointed_iteration.txt"
_WORD, _HEAD = "embedding.word.weight", "output.weight"
_OWN_HEAD = (
    "the output layer differs from the word embedding and is kept, "
    "though untie_embeddings_and_output_weights is not set"
)
_STEP = re.compile(r"[0-9]{1,18}")


def is_checkpoint(source: Path) -> bool:
    """Whether ``source`` is a folder of Megatron's checkpoints, or one of its steps."""
    return (source / LATEST).is_file() or is_sharded(source) or is_distributed(source)


def read(source: Path) -> Weights:
    """The model in ``source``, a step's folder or the folder of all steps, whose newest counts. Values are read later.

    Raises :class:`CheckpointError` with every reason why the network has no counterpart here, and for files that are
    damaged or unsafe.
    """
    folder = _step_folder(source)
    found = read_shards(folder) if is_sharded(folder) else read_distributed(folder)
    try:
        reasons = list(network_faults(found.arguments))
        reasons += ["--multi-latent-attention: no tensors of latents are read"] if is_latent(found.arguments) else []
        vocabulary = _vocabulary(found)
        settings = (*network(found.arguments), *experts(found.arguments), vocabulary)
        layout = _layout(found, vocabulary.value)
    except (TypeError, ValueError, ArithmeticError, InputError) as error:
        raise CheckpointError(f"the arguments in {source} are damaged", why=str(error)) from error
    if reasons:
        raise CheckpointError(f"{source} cannot be imported", why="; ".join(reasons))
    tensors = our_tensors(layout, found.tensors, str(source))
    tied = not found.arguments.get("untie_embeddings_and_output_weights")
    own_head = tied and _HEAD in tensors and _WORD in tensors and not torch.equal(tensors[_HEAD](), tensors[_WORD]())
    if tied and not own_head:
        tensors.pop(_HEAD, None)
    longest = found.arguments.get("max_position_embeddings" if not is_rotated(found.arguments) else "seq_length")
    config = {setting.key.removeprefix("model."): setting.value for setting in settings}
    return Weights(
        config=nested(config | ({"tie_embeddings": False} if own_head else {})),
        tensors=tensors,
        step=found.step,
        sequence_length=longest if isinstance(longest, int) else None,
        notes=(*_notes(found, vocabulary), *([_OWN_HEAD] if own_head else [])),
    )


def _step_folder(source: Path) -> Path:
    """The folder of one step in ``source``."""
    if not (source / LATEST).is_file():
        if is_sharded(source) or is_distributed(source):
            return source
        raise CheckpointError(f"{source} holds no checkpoint of Megatron", fix="name the folder with iter_*, or one")
    step = read_whole(source / LATEST).decode(errors="replace")[:100].strip()
    if step != "release" and not _STEP.fullmatch(step):
        raise CheckpointError(f"{source / LATEST} is damaged", why=f"{step!r} is no number of a step")
    folder = source / (step if step == "release" else f"iter_{int(step):07d}")
    if not (is_sharded(folder) or is_distributed(folder)):
        raise CheckpointError(f"{folder} holds no checkpoint", why=f"{source / LATEST} says that it is the newest")
    return folder


def _vocabulary(found: Found) -> Setting:
    """The size of the vocabulary: from the arguments, else the rows of the embedding, padding included."""
    said = find_vocabulary(found.arguments)
    if said is not None:
        return said
    rows = sum(len(read()) for read in found.tensors.get("embedding.word_embeddings.weight", ()))
    return Setting("model.vocab_size", rows, WITH_PADDING)


def _layout(found: Found, vocabulary: int) -> Network:
    """The causes of the layouts of tensors. Raises ValueError where the arguments do not tell."""
    given = found.arguments.get
    heads = count_of(found.arguments, "num_attention_heads")
    groups = count_of(found.arguments, "num_query_groups") if given("group_query_attention") else heads
    if not groups or heads % groups:
        raise ValueError(f"{heads} heads in {groups} groups")
    return Network(
        groups=groups,
        queries=heads // groups,
        vocab=vocabulary,
        gated=bool(given("swiglu")),
        experts=count_of(found.arguments, "num_experts"),
        centred=bool(given("apply_layernorm_1p")),
    )


def _notes(found: Found, vocabulary: Setting) -> list[str]:
    """Notices for the user about values that were not imported."""
    notes = []
    if vocabulary.why == WITH_PADDING:
        notes.append(f"the vocabulary is the embedding's, {WITH_PADDING}")
    precision = next((name for name in ("bf16", "fp16") if found.arguments.get(name)), "")
    if precision and not found.masters:
        notes.append(f"weights are those of the {precision} model: the optimizer's fp32 values are not taken")
    return notes

"""megatron-core's GPT on a CPU, and its checkpoints as Megatron-LM lays them out."""

from __future__ import annotations

import os
import queue
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.nn import functional as F

from benchmarks.support.megatron import TorchOnCpu

VOCAB, PADDED, LENGTH = 61, 128, 16
#: Sizes that all differ. The arguments are Megatron's.
GPT: Mapping[str, Any] = {
    "num_layers": 4,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "ffn_hidden_size": 40,
    "seq_length": LENGTH,
    "max_position_embeddings": LENGTH,
    "vocab_size": VOCAB,
    "padded_vocab_size": PADDED,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "rotary_base": 10000,
    "init_method_std": 0.3,
    "add_bias_linear": True,
    "bias_gelu_fusion": True,
    "swiglu": False,
    "group_query_attention": False,
    "num_query_groups": 1,
    "untie_embeddings_and_output_weights": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "params_dtype": torch.float32,
}
#: Layers 0 and 2 have four experts and a shared one, the others none.
MIXTURE: Mapping[str, Any] = {
    **GPT,
    "swiglu": True,
    "add_bias_linear": False,
    "bias_gelu_fusion": False,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_layer_freq": 2,
    "moe_shared_expert_intermediate_size": 12,
    "moe_token_dispatcher_type": "allgather",
    "expert_model_parallel_size": 1,
}
LLAMA: Mapping[str, Any] = {
    **GPT,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "norm_epsilon": 3e-5,
    "rotary_base": 500,
    "add_bias_linear": False,
    "bias_gelu_fusion": False,
    "swiglu": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
#: What later models added to attention.
MODERN: Mapping[str, Any] = {
    **LLAMA,
    "kv_channels": 8,
    "add_qkv_bias": True,
    "qk_layernorm": True,
    "swiglu": False,
    "squared_relu": True,
    "window_size": (4, 0),
    "window_attn_skip_freq": 2,
    "rotary_base": 1000000,
    "rotary_percent": 0.5,
    "no_rope_freq": [0, 0, 1, 0],
    "use_rope_scaling": True,
    "rope_scaling_factor": 4.0,
}
#: Modules of megatron-core that name a GPU.
_ON_GPU = (
    "utils",
    "transformer.utils",
    "models.common.embeddings.rotary_pos_embedding",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.state_dict_saver",
    "transformer.moe.router",
    "transformer.moe.moe_utils",
    "transformer.moe.token_dispatcher",
)


@contextmanager
def megatron_core(store: Path) -> Iterator[None]:
    """One rank of megatron-core on the CPU; afterwards its modules and this process are as they were."""
    writer = import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    state: Any = import_module("megatron.core.parallel_state")
    modules = [import_module(f"megatron.core.{name}") for name in _ON_GPU]
    patches: list[Any] = [patch.object(module, "torch", TorchOnCpu()) for module in modules]
    patches += [patch.dict(os.environ), patch.object(sys, "excepthook", sys.excepthook)]  # to restore them
    patches.append(patch.object(writer, "_results_queue", queue.Queue()))
    patches.append(patch.object(import_module("torch._dynamo.config"), "disable", True))  # its fused functions, unfused
    gemm = import_module("megatron.core.transformer.moe.moe_utils")
    patches.append(patch.object(gemm, "te_general_gemm", None, create=True))  # it asks for it where it was not imported
    tracker = SimpleNamespace(fork=nullcontext)  # dropout, here 0, needs none
    layers = import_module("megatron.core.tensor_parallel")
    patches.append(patch.object(layers, "get_cuda_rng_tracker", lambda: tracker))
    for each in patches:
        each.start()
    dist.init_process_group("gloo", store=FileStore(str(store), 1), rank=0, world_size=1)
    try:
        state.initialize_model_parallel(create_gloo_process_groups=False)
        yield
    finally:
        state.destroy_model_parallel()
        state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None  # which that forgets, and with it all its sockets
        rotary = import_module("megatron.core.models.common.embeddings.rotary_pos_embedding")
        rotary.RotaryEmbedding.forward.cache_clear()  # of all models
        dist.destroy_process_group()
        for each in reversed(patches):
            each.stop()


def random_state(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Random tensors with the names and shapes that megatron-core's local layers have for such arguments."""
    hidden, heads, ffn = given["hidden_size"], given["num_attention_heads"], given["ffn_hidden_size"]
    groups = given["num_query_groups"] if given["group_query_attention"] else heads
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (given["padded_vocab_size"], hidden),
        "embedding.position_embeddings.weight": (given["max_position_embeddings"], hidden),
        "decoder.final_layernorm.weight": (hidden,),
        "decoder.final_layernorm.bias": (hidden,),
    }
    linears = {
        "self_attention.linear_qkv": (hidden // heads * (heads + 2 * groups), hidden),
        "self_attention.linear_proj": (hidden, hidden),
        "mlp.linear_fc1": ((1 + given["swiglu"]) * ffn, hidden),
        "mlp.linear_fc2": (hidden, ffn),
    }
    for layer in range(given["num_layers"]):
        prefix = f"decoder.layers.{layer}"
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            shapes |= {f"{prefix}.{norm}.{kind}": (hidden,) for kind in ("weight", "bias")}
        mixed = "num_experts" in given and layer % given["moe_layer_freq"] == 0
        for name, shape in (_mixture(given) if mixed else linears).items():
            shapes[f"{prefix}.{name}.weight"] = shape
            if given["add_bias_linear"]:
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
    generator = torch.Generator().manual_seed(6)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _mixture(given: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The matrices of a layer with experts, as in :data:`MIXTURE`."""
    hidden, ffn, shared = (
        given[name] for name in ("hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    )
    found: dict[str, tuple[int, ...]] = {
        "self_attention.linear_qkv": (3 * hidden, hidden),
        "self_attention.linear_proj": (hidden, hidden),
        "mlp.router": (given["num_experts"], hidden),
        "mlp.shared_experts.linear_fc1": (2 * shared, hidden),
        "mlp.shared_experts.linear_fc2": (hidden, shared),
    }
    for expert in range(given["num_experts"]):
        found[f"mlp.experts.local_experts.{expert}.linear_fc1"] = (2 * ffn, hidden)
        found[f"mlp.experts.local_experts.{expert}.linear_fc2"] = (hidden, ffn)
    return found


def network(given: Mapping[str, Any]) -> Any:
    """Its GPT with random weights, norms and biases."""
    arguments = Namespace(**given)
    mixture = {name: value for name, value in given.items() if name.startswith("moe_")}
    later = ("kv_channels", "add_qkv_bias", "qk_layernorm", "window_size", "window_attn_skip_freq", "no_rope_freq")
    mixture |= {"num_moe_experts": given["num_experts"]} if "num_experts" in given else {}
    config = import_module("megatron.core.transformer.transformer_config").TransformerConfig(
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        num_attention_heads=arguments.num_attention_heads,
        num_query_groups=arguments.num_query_groups if arguments.group_query_attention else None,
        ffn_hidden_size=arguments.ffn_hidden_size,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_func=_activation(given),
        gated_linear_unit=arguments.swiglu,
        add_bias_linear=arguments.add_bias_linear,
        bias_activation_fusion=arguments.bias_gelu_fusion,
        normalization=arguments.normalization,
        layernorm_epsilon=arguments.norm_epsilon,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        **mixture,
        **{name: given[name] for name in later if name in given},
    )
    gpt, specs = (import_module(f"megatron.core.models.gpt.{name}") for name in ("gpt_model", "gpt_layer_specs"))
    qk_layernorm = given.get("qk_layernorm", False)
    spec = specs.get_gpt_layer_local_spec(normalization=arguments.normalization, qk_layernorm=qk_layernorm)
    if mixture:
        spec = specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=arguments.normalization
        )
    model = gpt.GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=arguments.padded_vocab_size,
        max_sequence_length=arguments.max_position_embeddings,
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
        position_embedding_type=arguments.position_embedding_type,
        rotary_base=arguments.rotary_base,
        rotary_percent=given.get("rotary_percent", 1.0),
        rope_scaling=given.get("use_rope_scaling", False),
        rope_scaling_factor=given.get("rope_scaling_factor", 8.0),
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


def _activation(given: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    if given.get("squared_relu"):
        squared: Callable[[Tensor], Tensor] = import_module("megatron.core.activations").squared_relu
        return squared
    return F.silu if given["swiglu"] else F.gelu


def logits(model: Any, tokens: Tensor) -> Tensor:
    """Tokens [b, s] -> [b, s, padded vocabulary]."""
    with torch.no_grad():
        result: Tensor = model.eval()(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    return result


def save_sharded(
    state: Mapping[str, Any], given: Mapping[str, Any], folder: Path, step: int, chunks: int = 1, **more: Any
) -> None:
    """As Megatron-LM's ``torch`` format: one file a rank, for the tensor and pipeline sizes in ``given``."""
    ranks, stages = given["tensor_model_parallel_size"], given["pipeline_model_parallel_size"]
    sharers = given.get("expert_model_parallel_size", 1)
    for rank, stage, sharer in product(range(ranks), range(stages), range(sharers)):
        numbers = (f"_{stage:03d}" if stages > 1 else "") + (f"_{sharer:03d}" if sharers > 1 else "")
        home = folder / f"iter_{step:07d}" / f"mp_rank_{rank:02d}{numbers}"
        home.mkdir(parents=True)
        pieces = [_piece(state, given, rank, stage, chunk, chunks) for chunk in range(chunks)]
        pieces = [_share(piece, sharer, given.get("num_experts", 0) // sharers) for piece in pieces]
        models = {"model": pieces[0]} if chunks == 1 else {f"model{n}": piece for n, piece in enumerate(pieces)}
        about = {"args": Namespace(**given), "checkpoint_version": 3.0, "iteration": step}
        torch.save({**about, **models, **more}, home / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


def _piece(
    state: Mapping[str, Any], given: Mapping[str, Any], rank: int, stage: int, chunk: int, chunks: int
) -> dict[str, Any]:
    """What one rank holds of one chunk: its layers numbered from 0, its rows and columns of each tensor."""
    stages, ranks = given["pipeline_model_parallel_size"], given["tensor_model_parallel_size"]
    each = given["num_layers"] // (stages * chunks)
    first = (chunk * stages + stage) * each
    at_start, at_end = (stage, chunk) == (0, 0), (stage, chunk) == (stages - 1, chunks - 1)
    found: dict[str, Any] = {}
    for name, tensor in state.items():
        words = name.split(".")
        if words[1] == "layers":
            layer = int(words[2]) - first
            if 0 <= layer < each:
                local = ".".join(["decoder", "layers", str(layer), *words[3:]])
                found[local] = _part(name, tensor, rank, ranks, gated=given["swiglu"])
        elif at_start if words[0] == "embedding" else at_end:
            found[name] = _part(name, tensor, rank, ranks, gated=False)
    if at_end and not at_start and not given["untie_embeddings_and_output_weights"]:
        repeated = state["embedding.word_embeddings.weight"]
        found["output_layer.weight"] = _part("output_layer.weight", repeated, rank, ranks)
    return found


def _share(piece: Mapping[str, Any], sharer: int, experts: int) -> dict[str, Any]:
    """What one of the ranks that share experts holds: its own, numbered from 0."""
    found: dict[str, Any] = {}
    for name, tensor in piece.items():
        before, local, after = name.partition(".local_experts.")
        if not local:
            found[name] = tensor
        elif int(after.split(".")[0]) // experts == sharer:
            number, _, rest = after.partition(".")
            found[f"{before}{local}{int(number) % experts}.{rest}"] = tensor
    return found


def _part(name: str, tensor: Any, rank: int, ranks: int, *, gated: bool = False) -> Any:
    """Rows of what is split by rows, columns of what is split by columns; of a gated layer rows of both halves."""
    if not isinstance(tensor, Tensor):
        return tensor  # a layer's extra state
    if "linear_fc1" in name and gated:
        return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)]).clone()
    if any(each in name for each in ("word_embeddings", "linear_qkv", "linear_fc1", "output_layer")):
        return tensor.chunk(ranks)[rank].clone()
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(ranks, dim=1)[rank].clone()
    return tensor.clone()

"""StarCoder2 (Lozhkov et al. 2024): rotary positions and a window, with the layer norms, GeLU and biases of GPT-2."""

from __future__ import annotations

from megatron_run_format_huggingface.families.llama import ATTENTION, DEFAULTS, ENDS, KEYS, NORMS
from megatron_run_format_huggingface.family import Family
from megatron_run_format_huggingface.sections import activation, rope

STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    defaults={
        **DEFAULTS,
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "initializer_range": 0.018042,
        "norm_epsilon": 1e-5,
        "sliding_window": None,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    keys={**KEYS, "norm.eps": "norm_epsilon", "bias": "use_bias", "attention.window": "sliding_window"},
    fixed={"norm.kind": "layernorm"},
    only={},
    sections=(
        rope(),
        activation("hidden_act", {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}),
    ),
    tensors={
        **ENDS,
        **ATTENTION,
        **NORMS,
        "layers.{layer}.mlp.c_fc": "layers.{layer}.mlp.input.up",
        "layers.{layer}.mlp.c_proj": "layers.{layer}.mlp.output",
    },
    dropouts=("residual_dropout", "embedding_dropout", "attention_dropout"),
)

"""Flags of attention become keys of gpt and deepseek; the logits are compared with megatron-core's beside this file."""

from __future__ import annotations

import pytest

from megatron_run_format_megatron.launch_script.translate import translate

LATENT = "--multi-latent-attention --position-embedding-type rope --disable-bias-linear"
LATENTS = f"{LATENT} --qk-layernorm --swiglu --normalization RMSNorm"


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--kv-channels 64 --hidden-size 64 --num-attention-heads 2", "model.head_size", 64),
        ("--kv-channels 32 --hidden-size 64 --num-attention-heads 2", "model.head_size", None),
        ("--add-qkv-bias --disable-bias-linear", "model.attention.qkv_bias", True),
        ("--add-qkv-bias", "model.attention.qkv_bias", None),  # all have biases
        ("--qk-layernorm", "model.attention.qk_norm", "head"),
        ("--window-size (127,0)", "model.attention.window", 128),
        ("--window-size -1,0", "model.attention.window", None),
        ("--window-size 7,0 --window-attn-skip-freq 3", "model.attention.window_pattern", [1, 1, 0]),
        ("--window-size 7,0 --window-attn-skip-freq [1]*2+[0]", "model.attention.window_pattern", [1, 1, 0]),
        ("--use-rotary-position-embeddings --no-rope-freq 3", "model.rope.pattern", [1, 1, 0]),
        ("--use-rotary-position-embeddings --no-rope-freq [0,0,1]", "model.rope.pattern", [1, 1, 0]),
        ("--use-rotary-position-embeddings --rotary-percent 0.25", "model.rope.fraction", 0.25),
        ("--use-rotary-position-embeddings --use-rope-scaling", "model.rope.factor", 8.0),
        ("--use-rotary-position-embeddings --rotary-seq-len-interpolation-factor 4", "model.rope.scaling", "linear"),
        ("--position-embedding-type none", "model.rope.pattern", [0]),
        ("--squared-relu", "model.activation", "relu_squared"),
        (LATENT, "model.use", "deepseek"),
        (LATENT, "model.kv_rank", 32),
        (f"{LATENT} --q-lora-rank 64", "model.query_rank", 64),
        (f"{LATENT} --mtp-num-layers 1", "model.mtp_loss_coeff", 0.1),
        (f"{LATENT} --rotary-scaling-factor 40", "model.rope.scaling", "yarn"),
        (f"{LATENT} --rotary-scaling-factor 40", "model.rope.attention_factor", None),  # ours is Megatron's
        (f"{LATENT} --rotary-scaling-factor 40 --rope-type rope", "model.rope.scaling", None),
        (f"{LATENT} --kv-channels 4 --qk-layernorm", "model.head_size", None),
    ],
)
def test_keys_that_follow_from_flags(words: str, name: str, value: object) -> None:
    found = translate(f"python pretrain_gpt.py {words}", "train.sh")
    assert {setting.key: setting.value for setting in found.settings}.get(name) == value


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        ("--window-size 128,4", "--window-size with 4 later tokens: a query sees earlier ones alone"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1: model=gpt predicts one token"),
        ("--rope-type yarn", "--rope-type yarn: only latent attention"),
        (f"{LATENT} --swiglu --normalization RMSNorm", "--multi-latent-attention without --qk-layernorm: latents"),
        (
            f"{LATENT} --qk-layernorm --swiglu",
            "Megatron's default of --normalization: with latent attention model.norm.kind is",
        ),
        (f"{LATENTS} --window-size 8,0", "--window-size: latent attention has no window"),
        (f"{LATENTS} --rotary-percent 0.5", "--rotary-percent 0.5: latent attention rotates all of"),
    ],
)
def test_what_makes_another_run_is_a_warning(words: str, warning: str) -> None:
    (found,) = translate(f"python pretrain_gpt.py {words}", "train.sh").warnings
    assert found.startswith(warning)

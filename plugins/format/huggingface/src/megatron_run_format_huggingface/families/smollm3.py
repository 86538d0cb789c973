"""SmolLM3 (Bakouch et al. 2025): Llama with layers that have no positions, and with windows in these if at all."""

from __future__ import annotations

from megatron_run_format_huggingface.families.llama import DEFAULTS, LLAMA
from megatron_run_format_huggingface.family import Config, Section
from megatron_run_format_huggingface.sections import SLIDING, rope, windows


def _rotates(config: Config) -> list[int]:
    """1 for a layer that rotates: as ``no_rope_layers`` lists them, despite its name, else all but every n-th."""
    every, layers = config["no_rope_layer_interval"], range(1, config["num_hidden_layers"] + 1)
    return config.get("no_rope_layers") or [int(layer % every != 0) for layer in layers]


def _unsupported(config: Config) -> list[str]:
    found = []
    if len(_rotates(config)) < config["num_hidden_layers"]:
        found.append(f"no_rope_layers lists fewer layers than num_hidden_layers={config['num_hidden_layers']}")
    # The mask of transformers has this window, its kernels of flash attention have none.
    if SLIDING in (config.get("layer_types") or ()) and not config["use_sliding_window"]:
        found.append(f"layer_types has {SLIDING!r} (only with use_sliding_window=True)")
    return found


SMOLLM3 = LLAMA._replace(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    defaults={
        **DEFAULTS,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
    },
    sections=(
        rope(theta=2e6),
        windows(
            lambda config, layer: not _rotates(config)[layer],
            {True: {"use_sliding_window": True}, False: {"use_sliding_window": False}},
        ),
        Section(
            lambda config: {"rope.pattern": tuple(_rotates(config)[: config["num_hidden_layers"]])},
            lambda options: {"no_rope_layers": list(options["rope.pattern"])},
            _unsupported,
        ),
        *LLAMA.sections[1:],
    ),
)

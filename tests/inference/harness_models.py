"""Folders of small models with tokenizers of their own, as people have them, for lm-evaluation-harness."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.plugins.format.huggingface.family_cases import CASES, SMALL
from tests.plugins.format.huggingface.saving import save

TEXT = "the quick brown fox jumps over the lazy dog and a dog is not a fox"
BOS, EOS, PAD, UNK, TURN = "<s>", "</s>", "<pad>", "<unk>", "<|im_end|>"
_SPECIAL = (BOS, EOS, PAD, UNK, TURN)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def byte_level(prefix: bool = False) -> Tokenizer:
    """GPT-2's form; ``prefix`` puts a space before every text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=prefix), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(made, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=list(_SPECIAL)))


def marked_spaces(prefix: bool = True) -> Tokenizer:
    """Llama 2's form: spaces are marked, one stands before a text, and characters without a token are bytes."""
    tokens = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    first = Tokenizer(models.BPE(unk_token=UNK))
    first.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    _trained(first, trainers.BpeTrainer(vocab_size=310, special_tokens=tokens, show_progress=False))
    state = json.loads(first.to_str())
    model = {**state["model"], "byte_fallback": True, "fuse_unk": True}
    added = [each for each in state["added_tokens"] if each["content"] in _SPECIAL]
    made = Tokenizer.from_str(json.dumps({**state, "model": model, "added_tokens": added, "pre_tokenizer": None}))
    begins = [normalizers.Prepend("▁")] if prefix else []
    made.normalizer = normalizers.Sequence([*begins, normalizers.Replace(" ", "▁")])
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return made


def _trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer


def around(made: Tokenizer, form: str) -> Tokenizer:
    """``made``, which puts the tokens of ``form`` around every text, as ``<s> $A``."""
    ids = [(text, made.token_to_id(text)) for text in (BOS, EOS)]
    made.post_processor = processors.TemplateProcessing(single=form, pair=None, special_tokens=ids)
    return made


#: Tokenizers by what is particular to them, with what their ``tokenizer_config.json`` says beside the special tokens.
TOKENIZERS: Mapping[str, tuple[Callable[[], Tokenizer], Mapping[str, Any]]] = {
    "nothing around": (byte_level, {"bos_token": None}),
    "a begin token": (lambda: around(byte_level(), f"{BOS} $A"), {}),
    "a begin token and spaces": (lambda: around(marked_spaces(), f"{BOS} $A"), {}),
    "a begin token, no first space": (lambda: around(marked_spaces(prefix=False), f"{BOS} $A"), {}),
    "an end token": (lambda: around(byte_level(), f"$A {EOS}"), {"bos_token": None}),
    "both": (lambda: around(byte_level(), f"{BOS} $A {EOS}"), {}),
    "a prefix space": (lambda: byte_level(prefix=True), {"add_prefix_space": True}),
    **{
        f"Llama's, add_bos_token={value}".lower(): (
            lambda: around(marked_spaces(), f"{BOS} $A"),
            {"tokenizer_class": "LlamaTokenizer", "add_bos_token": value, "add_eos_token": False},
        )
        for value in (True, False)
    },
}


def save_model(
    folder: Path,
    case: str,
    tokenizer: str,
    *,
    generation: Mapping[str, Any] | None = None,
    length: int = 16,
    template: str = TEMPLATE,
) -> None:
    """A random model of the family of ``case``, which reads ``length`` tokens, with that tokenizer."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    make, says = TOKENIZERS[tokenizer]
    made = make()
    torch.manual_seed(2)
    given = {**SMALL, **CASES[case].config, "vocab_size": made.get_vocab_size(), "max_position_embeddings": length}
    ids = {"bos_token_id": made.token_to_id(BOS), "eos_token_id": made.token_to_id(EOS)}
    config = CONFIG_MAPPING[CASES[case].family](**{**given, **ids})
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    save(model, folder)
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": UNK, "chat_template": template}
    words = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **says}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in words.items() if v is not None}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({**ids, **generation}))

"""The part of a folder read without transformers: what this package reproduces exactly, and the field that forbids it.

Only classes that take ``tokenizer.json`` as it is are read here. Every option that would change ids, special tokens or
decoded text must be absent, without effect, or in agreement with ``tokenizer.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_run_engine.data.tokenizer_folder.json_parts import read_json, read_text
from megatron_run_engine.data.tokenizer_folder.record import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    DEFAULT,
    MODEL_CONFIG,
    PLAIN_CLASS,
    SPECIAL_MAP,
    TEMPLATES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    FolderTokenizer,
)

_PLAIN = (PLAIN_CLASS, "TokenizersBackend")
_GPT2 = ("GPT2Tokenizer", "GPT2TokenizerFast")
#: Options without an effect on ids, special tokens and text where ``tokenizer.json`` is taken as it is.
_NO_EFFECT = frozenset(
    (
        *("tokenizer_class", "model_max_length", "model_input_names", "name_or_path", "processor_class", "backend"),
        *("padding_side", "truncation_side", "is_local", "local_files_only", "add_bos_token", "add_eos_token"),
        *("chat_template", "pad_token_type_id", "max_length", "stride", "truncation_strategy", "pad_to_multiple_of"),
    )
)
_SPLITS, _CLEANS = "split_special_tokens", "clean_up_tokenization_spaces"
_CLEANS_BPE = f"{_CLEANS}_for_bpe_even_though_it_will_corrupt_output"
_MORE = ("additional_special_tokens", "extra_special_tokens")
#: Types of models whose folders keep the class that they name. transformers overrides it for some others.
KEEPS_CLASS = frozenset(
    (
        *("gpt2", "llama", "gemma2", "gemma3_text", "qwen3", "olmo2", "smollm3", "granite", "stablelm"),
        *("gpt_neox", "starcoder2", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"),
    )
)


class NotExact(Exception):
    """The fields of a folder's files that decide, and are not read here: ``FILE says FIELD=VALUE``."""


def read_exactly(folder: Path) -> FolderTokenizer:
    """The tokenizer of ``folder``. Raises :class:`NotExact`, and :class:`ValueError` for a file that is broken."""
    config, model = read_json(folder, TOKENIZER_CONFIG), read_json(folder, MODEL_CONFIG)
    content, backend = read_text(folder, TOKENIZER), read_json(folder, TOKENIZER)
    added = _added(backend)
    if content is None:
        raise NotExact(f"{folder} has no {TOKENIZER}")
    gpt2 = _is_gpt2(model, config, backend)
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>") if gpt2 else {}
    special |= _named(config)
    if backend.get("padding"):  # transformers takes its token, unless the configuration names another
        special.setdefault("pad_token", str(backend["padding"].get("pad_token", "")))
    _check_named(special, added)
    _check_options(config, added)
    _check_map(folder, special, added)
    _check_decoder(folder, config, added)
    bpe = (backend.get("model") or {}).get("type") == "BPE"
    return FolderTokenizer(
        backend=content,
        special=special,
        templates=dict(_templates(folder, config)),
        splits_special=bool(config.get(_SPLITS)),
        cleans_up=bool(config.get(_CLEANS)) and (not bpe or bool(config.get(_CLEANS_BPE))),
    )


def _added(backend: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The added tokens of ``tokenizer.json`` by their texts. Raises :class:`ValueError` for one without text or id."""
    found = {}
    for token in backend.get("added_tokens") or ():
        if not isinstance(token, dict) or not isinstance(token.get("content"), str) or type(token.get("id")) is not int:
            raise ValueError(f"{TOKENIZER} has a token without text or id among added_tokens")
        found[token["content"]] = token
    return found


def _is_gpt2(model: Mapping[str, Any], config: Mapping[str, Any], backend: Mapping[str, Any]) -> bool:
    """Whether the class is GPT-2's, whose parts ``tokenizer.json`` must have. Raises :class:`NotExact` for another."""
    named, kind, also = config.get("tokenizer_class"), model.get("model_type"), model.get("tokenizer_class")
    if "auto_map" in config:
        raise NotExact(f"{TOKENIZER_CONFIG} says auto_map, which names a program")
    if named is None and kind not in (None, "gpt2"):
        raise NotExact(f"{MODEL_CONFIG} says model_type={kind}, which decides the class")
    if named not in (None, *_PLAIN, *_GPT2):
        raise NotExact(f"{TOKENIZER_CONFIG} says tokenizer_class={named}")
    if named is not None and kind is not None and kind not in KEEPS_CLASS:
        raise NotExact(f"{MODEL_CONFIG} says model_type={kind}, which may decide the class")
    if (also or named) != named:
        raise NotExact(f"{MODEL_CONFIG} says tokenizer_class={also}")
    gpt2 = named in _GPT2 or (named is None and kind == "gpt2")
    if gpt2 and not _has_gpt2s_parts(backend, config):
        raise NotExact(f"{TOKENIZER} has parts that GPT2Tokenizer replaces by its own")
    return gpt2


def _has_gpt2s_parts(backend: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether normalizer, splitting, model and decoder are those that the class GPT2Tokenizer makes."""
    split, model, decoder = (backend.get(part) or {} for part in ("pre_tokenizer", "model", "decoder"))
    unusual = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback")
    prefix = bool(config.get("add_prefix_space"))
    return (
        backend.get("normalizer") is None
        and (split.get("type"), split.get("add_prefix_space"), split.get("use_regex", True))
        == ("ByteLevel", prefix, True)
        and model.get("type") == "BPE"
        and not any(model.get(key) for key in (*unusual, "ignore_merges", "unk_token"))
        and decoder.get("type") == "ByteLevel"
    )


def _named(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens that have names, such as ``bos_token`` and a model's own ``image_token``."""
    found = {key: _text_of(value) for key, value in config.items() if key.endswith("_token") and not _flag(key)}
    return {key: text for key, text in found.items() if text is not None}


def _flag(key: str) -> bool:
    return key in ("add_bos_token", "add_eos_token")


def _text_of(token: Any) -> str | None:
    """The text of a special token, which may be kept with options."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _is_special(text: str, added: Mapping[str, Mapping[str, Any]]) -> bool:
    return text in added and bool(added[text].get("special"))


def _check_named(special: Mapping[str, str], added: Mapping[str, Mapping[str, Any]]) -> None:
    for key, text in special.items():
        if not _is_special(text, added):
            raise NotExact(f"{TOKENIZER_CONFIG} says {key}={text}, and {TOKENIZER} has no such special token")


def _check_options(config: Mapping[str, Any], added: Mapping[str, Mapping[str, Any]]) -> None:
    for key, value in config.items():
        if key in _MORE:
            if isinstance(value, dict):
                raise NotExact(f"{TOKENIZER_CONFIG} says {key} by names")
            for text in map(_text_of, value or ()):
                if text is None or not _is_special(text, added):
                    raise NotExact(f"{TOKENIZER_CONFIG} says {key}, and {TOKENIZER} has no special token {text}")
            continue
        known = key in _NO_EFFECT or key in (_SPLITS, _CLEANS, _CLEANS_BPE, "added_tokens_decoder")
        if known or key.endswith("_token") or value is None:
            continue
        if key == "add_prefix_space" and not value:
            continue
        if key in ("errors", "legacy", "use_default_system_prompt") and not (key == "errors" and value != "replace"):
            continue
        raise NotExact(f"{TOKENIZER_CONFIG} says {key}={json.dumps(value, ensure_ascii=False)[:60]}")


def _check_map(folder: Path, special: Mapping[str, str], added: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise :class:`NotExact` unless ``special_tokens_map.json`` says what ``tokenizer_config.json`` does."""
    for key, value in read_json(folder, SPECIAL_MAP).items():
        if key in _MORE and isinstance(value, list):
            texts = [_text_of(each) for each in value]
            if all(text is not None and _is_special(text, added) for text in texts):
                continue
        elif special.get(key) == _text_of(value):
            continue
        raise NotExact(f"{SPECIAL_MAP} says {key}")


def _check_decoder(folder: Path, config: Mapping[str, Any], added: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise :class:`NotExact` unless the added tokens of all files are those of ``tokenizer.json``."""
    own = {token["id"]: {key: value for key, value in token.items() if key != "id"} for token in added.values()}
    for number, token in (config.get("added_tokens_decoder") or {}).items():
        if not number.isdecimal() or own.get(int(number)) != token:
            raise NotExact(
                f"{TOKENIZER_CONFIG} says added_tokens_decoder, which differs from {TOKENIZER} at id {number}"
            )
    for text, number in read_json(folder, ADDED_TOKENS).items():
        if text not in added or added[text]["id"] != number:
            raise NotExact(f"{ADDED_TOKENS} says {text}={number}, and {TOKENIZER} does not")


def _templates(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The chat templates of the folder: those in files of their own hide those of ``tokenizer_config.json``."""
    files = {DEFAULT: read_text(folder, CHAT_TEMPLATE)}
    more = folder / TEMPLATES
    for path in sorted(more.glob("*.jinja")) if more.is_dir() else ():
        files[path.stem] = read_text(folder, f"{TEMPLATES}/{path.name}")
    kept = {name: text for name, text in files.items() if text is not None}
    said = config.get("chat_template")
    if kept:
        yield from kept.items()
    elif isinstance(said, str):
        yield DEFAULT, said
    elif isinstance(said, list):
        for each in said:
            if isinstance(each, dict) and isinstance(each.get("name"), str) and isinstance(each.get("template"), str):
                yield each["name"], each["template"]
    elif isinstance(said, dict):
        yield from ((name, text) for name, text in said.items() if isinstance(text, str))

"""Folders of tokenizers as people have them, made at random: every kind, option and flag, and templates."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

#: What tokenizers learn from, and what is encoded beside it.
CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "A naïve café has 12,345 résumés at 9:30! 日本語の文 and emoji 🎉 too.",
    "def f(x):\n    return  x ** 2\t# squares\n\n\nNext paragraph",
    "the The THE dogs jumped; foxes are jumping  over   spaces , and more .",
    "Ünïcode ﬁ ligatures, straße, Ελληνικά, עברית, العربية, हिन्दी",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    " leading",
    "trailing ",
    "a\u0301 b\u00e1",
    "\u200b\x07 unseen ẞ𝄞",
    "x<|im_end|>y </s> <s>z",
    "[SEP] MASK",
]
#: Names of tokens that begin, end and fill texts, as families of models have them.
_NAMES = (
    ("<s>", "</s>", "<pad>", "<unk>"),
    ("<bos>", "<eos>", "<pad>", "<unk>"),
    ("<|begin|>", "<|end|>", "<|pad|>", "<|unk|>"),
    ("<|endoftext|>", "<|im_end|>", "<|endoftext|>", "<|unk|>"),
)
#: Templates with tools, dates, marks of answers, thoughts and generation prompts.
TEMPLATES = tuple(
    "".join(parts)
    for parts in (
        (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}",
            "{{ '<|im_end|>\n' }}{% endfor %}",
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ),
        (
            "{{ bos_token }}{% if tools is not none %}{{ tools | tojson }}{% endif %}{% for m in messages %}",
            "[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}",
        ),
        (
            "{%- if tools %}{{- 'Tools: ' + (tools | tojson(indent=2)) }}{%- endif %}{% for m in messages %}",
            "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}",
            "{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}{{ pad_token }}",
        ),
        (
            "Today {{ strftime_now('%Y') }}.{% set ns = namespace(n=0) %}{% for m in messages %}",
            "{% set ns.n = ns.n + 1 %}{{ ns.n }} {{ m.content | trim }}",
            "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}{% endif %}",
            "{{ '</s>' }}{% endfor %}{% if documents %}D{% endif %}{% if add_generation_prompt %}>{% endif %}",
        ),
        (
            "{{- bos_token }}{% if date_string is not defined %}{% if strftime_now is defined %}",
            "{% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = '26 Jul 2024' %}",
            "{% endif %}{% endif %}{% if not tools is defined %}{% set tools = none %}{% endif %}",
            "{{ 'Today: ' + date_string }}{% for m in messages %}",
            "{% if m.role == 'system' and loop.first %}<<{{ m.content }}>>{% continue %}",
            "{% endif %}{% for d in documents or [] %}{{ d.title }}: {{ d.text }}{% endfor %}",
            "{{ m.content.split()[0] }}{{ eos_token }}{% endfor %}",
            "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}",
            "{% if add_generation_prompt %}{{ strftime_now('%A, %-d %B') ~ ' ' ~ (messages | length) }}{% endif %}",
        ),
    )
)


@dataclass(frozen=True)
class Made:
    """A folder, and words for what it has that others have not."""

    folder: Path
    kind: str
    words: tuple[str, ...] = field(default=())


def make(seed: int, folder: Path) -> Made:
    """Write the tokenizer of ``seed`` into the new ``folder``."""
    chosen = random.Random(seed)
    folder.mkdir(parents=True)
    kind = tuple(KINDS)[seed % len(KINDS)]
    bos, eos, pad, unk = ("[CLS]", "[SEP]", "[PAD]", "[UNK]") if kind == "WordPiece" else chosen.choice(_NAMES)
    tokenizer = KINDS[kind](chosen, [pad, unk, bos, eos])
    _add_tokens(tokenizer, chosen)
    if chosen.random() < 0.5:
        _around(tokenizer, chosen, bos, eos)
    config = _config(chosen, {"bos_token": bos, "eos_token": eos, "pad_token": pad, "unk_token": unk})
    words = [key for key in config if not key.endswith("_token")]
    if chosen.random() < 0.15:
        tokenizer.enable_truncation(5)
    _write(folder, chosen, tokenizer, config)
    return Made(folder, kind, tuple(words))


def _older(folder: Path, chosen: random.Random, tokenizer: Tokenizer) -> bool:
    """Write ``tokenizer`` as the files of before ``tokenizer.json``, where the kind has them, and a type of model."""
    model = json.loads(tokenizer.to_str())["model"]
    if model["type"] == "WordPiece":
        tokens = sorted(model["vocab"], key=model["vocab"].get)
        (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
        kind = "bert"
    elif isinstance(tokenizer.decoder, decoders.ByteLevel):
        tokenizer.model.save(str(folder))
        kind = chosen.choice(["gpt2", "qwen2"])
    else:
        return False
    (folder / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    return True


def _trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def _byte_level(chosen: random.Random, special: Sequence[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=chosen.random() < 0.3)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = chosen.randrange(300, 420)
    return _trained(
        made,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=_unique(special), initial_alphabet=alphabet, show_progress=False
        ),
    )


def _words_bpe(chosen: random.Random, special: Sequence[str]) -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token=special[1], fuse_unk=chosen.random() < 0.5))
    made.normalizer = chosen.choice([None, normalizers.NFKC(), normalizers.Lowercase(), normalizers.NFC()])
    made.pre_tokenizer = chosen.choice([pre_tokenizers.Whitespace(), pre_tokenizers.Metaspace()])
    made.decoder = (
        decoders.Metaspace() if isinstance(made.pre_tokenizer, pre_tokenizers.Metaspace) else decoders.BPEDecoder()
    )
    return _trained(made, trainers.BpeTrainer(vocab_size=200, special_tokens=_unique(special), show_progress=False))


def _byte_fallback(chosen: random.Random, special: Sequence[str]) -> Tokenizer:
    """Llama 2's form: spaces are marked, and characters without a token are bytes."""
    first = Tokenizer(models.BPE(unk_token=special[1]))
    first.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    tokens = [*_unique(special), *(f"<0x{byte:02X}>" for byte in range(256))]
    _trained(first, trainers.BpeTrainer(vocab_size=420, special_tokens=tokens, limit_alphabet=40, show_progress=False))
    state = json.loads(first.to_str())
    model = {**state["model"], "byte_fallback": True, "fuse_unk": True}
    added = [each for each in state["added_tokens"] if each["content"] in special]
    made = Tokenizer.from_str(json.dumps({**state, "model": model, "added_tokens": added, "pre_tokenizer": None}))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def sentencepiece(seed: int, folder: Path) -> Made:
    """A folder with a SentencePiece model alone, of either algorithm, with and without byte fallback."""
    import sentencepiece

    chosen = random.Random(seed)
    folder.mkdir(parents=True)
    text = folder.with_suffix(".txt")
    text.write_text("\n".join(line for line in CORPUS * 20), encoding="utf-8")
    kind, fallback = chosen.choice(["bpe", "unigram"]), chosen.random() < 0.5
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=400 if fallback else 140,
        model_type=kind,
        byte_fallback=fallback,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    text.unlink()
    (folder / "config.json").write_text(
        json.dumps({"model_type": chosen.choice(["llama", "gemma2"])}), encoding="utf-8"
    )
    if chosen.random() < 0.5:
        config: dict[str, Any] = {key: chosen.random() < 0.5 for key in ("add_bos_token", "add_eos_token")}
        config |= {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Made(folder, f"SentencePiece {kind}", ("byte_fallback",) * fallback)


def _unigram(chosen: random.Random, special: Sequence[str]) -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = chosen.choice([normalizers.NFKC(), normalizers.Nmt()])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=chosen.choice(["always", "first", "never"]))
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=_unique(special), unk_token=special[1], show_progress=False
    )
    return _trained(made, trainer)


def _wordpiece(chosen: random.Random, special: Sequence[str]) -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token=special[1]))
    made.normalizer = normalizers.BertNormalizer(lowercase=chosen.random() < 0.5)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=chosen.random() < 0.5)
    return _trained(
        made, trainers.WordPieceTrainer(vocab_size=200, special_tokens=_unique(special), show_progress=False)
    )


#: How a tokenizer of each kind is made, with the texts of its special tokens: fill, unknown, begin, end.
KINDS: dict[str, Callable[[random.Random, Sequence[str]], Tokenizer]] = {
    "byte-level BPE": _byte_level,
    "BPE of words": _words_bpe,
    "BPE with byte fallback": _byte_fallback,
    "unigram": _unigram,
    "WordPiece": _wordpiece,
}


def _unique(special: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(special))


def _add_tokens(tokenizer: Tokenizer, chosen: random.Random) -> None:
    """Added tokens with every combination of flags, special ones and others."""
    for text in chosen.sample(
        ["<|im_start|>", "<|im_end|>", "fox", " the", "MASK", "日本", "<tool>"], chosen.randrange(5)
    ):
        flags = {name: chosen.random() < 0.3 for name in ("lstrip", "rstrip", "single_word", "normalized")}
        add = tokenizer.add_special_tokens if chosen.random() < 0.5 else tokenizer.add_tokens
        add([AddedToken(text, **flags)])


def _around(tokenizer: Tokenizer, chosen: random.Random, bos: str, eos: str) -> None:
    """What is put around every text: a begin token, an end token or both."""
    single = chosen.choice([f"{bos} $A", f"{bos} $A {eos}", f"$A {eos}"])
    ids = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys((bos, eos))]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=None, special_tokens=ids)


def _config(chosen: random.Random, named: dict[str, str]) -> dict[str, Any]:
    """``tokenizer_config.json``: some of the special tokens, and options that change something or nothing."""
    config: dict[str, Any] = {key: text for key, text in named.items() if chosen.random() < 0.85}
    config["tokenizer_class"] = chosen.choice(
        ["PreTrainedTokenizerFast"] * 5 + ["LlamaTokenizer", "GPT2Tokenizer", "TokenizersBackend"]
    )
    options: dict[str, Callable[[], Any]] = {
        "add_bos_token": lambda: chosen.random() < 0.5,
        "add_eos_token": lambda: chosen.random() < 0.5,
        "add_prefix_space": lambda: chosen.random() < 0.5,
        "clean_up_tokenization_spaces": lambda: chosen.random() < 0.7,
        "split_special_tokens": lambda: chosen.random() < 0.7,
        "model_max_length": lambda: 7,
        "padding_side": lambda: "left",
        "additional_special_tokens": lambda: chosen.sample(["<|im_start|>", "<|im_end|>", "<tool>", "fox"], 2),
        "added_tokens_decoder": lambda: {"900": _token("<|new|>", chosen), "901": _token("new", chosen)},
        "image_token": lambda: "<image>",
        "legacy": lambda: chosen.random() < 0.5,
        "cls_token": lambda: "[CLS]",
        "do_lower_case": lambda: True,
    }
    for key in chosen.sample(sorted(options), chosen.randrange(4)):
        config[key] = options[key]()
    if chosen.random() < 0.3 and "eos_token" in config:
        # Not normalized: one that is normalized at first and not later is decoded by its old text until it is saved.
        flags = {**_token(config["eos_token"], chosen), "special": True, "normalized": False}
        config["eos_token"] = {"__type": "AddedToken", **flags}
    return config


def _token(text: str, chosen: random.Random) -> dict[str, Any]:
    flags = {name: chosen.random() < 0.3 for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
    return {"content": text, **flags}


def _write(folder: Path, chosen: random.Random, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """The files of a folder, the template in one of the places where templates are kept."""
    template, place = chosen.choice([None, *TEMPLATES]), chosen.random()
    if template is not None and place < 0.4:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    elif template is not None and place < 0.8:
        config["chat_template"] = template
    elif template is not None:
        config["chat_template"] = [
            {"name": "default", "template": template},
            {"name": "tool_use", "template": TEMPLATES[1]},
        ]
    if chosen.random() < 0.2:
        texts = {
            key: "fox" if chosen.random() < 0.2 else config[key] for key in ("bos_token", "pad_token") if key in config
        }
        (folder / "special_tokens_map.json").write_text(json.dumps(texts), encoding="utf-8")
    if chosen.random() < 0.1:
        (folder / "added_tokens.json").write_text(json.dumps({"<added>": tokenizer.get_vocab_size()}), encoding="utf-8")
    if chosen.random() < 0.3:
        kind = chosen.choice(["llama", "gpt2", "qwen2", "gemma2", "phi3", "mistral", "bert"])
        (folder / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    if chosen.random() < 0.3:
        ends = chosen.choice([3, [2, 3], [7], None])
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    if chosen.random() < 0.2 and _older(folder, chosen, tokenizer):
        config.pop("tokenizer_class")
    else:
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")

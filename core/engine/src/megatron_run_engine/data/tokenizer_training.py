"""Trains tokenizers of texts, by the trainers of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_run.errors import DataError, InputError
from megatron_run.files.publishing import publishing
from megatron_run_engine.data.tokenizer_json import to_json

#: The special tokens of each kind, which get the first ids. The end of a document is among them.
SPECIAL = {
    "bpe": ["<|endoftext|>"],
    "wordpiece": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    "unigram": ["<unk>", "</s>"],
}
#: The kinds, in the order of a help text.
KINDS = tuple(SPECIAL)
#: The ids of ``bpe`` before it has read anything: a byte each, and its special tokens.
_LEAST_BPE = 256 + len(SPECIAL["bpe"])
#: How the library begins to say that a ``unigram`` vocabulary has no room for all characters.
_TOO_SMALL = "The vocabulary is not large enough"


def train_tokenizer(texts: Iterable[str], kind: str, vocab_size: int, out: Path) -> int:
    """Write the tokenizer of ``kind`` that ``texts`` give to ``out``; return its number of ids, at most ``vocab_size``.

    ``bpe`` is GPT-2's, over bytes (Sennrich et al. 2016; Radford et al. 2019); ``wordpiece`` is BERT's for lower case
    (Schuster and Nakajima 2012); ``unigram`` is Kudo's (2018), as T5 has it. The library numbers words of equal
    frequency anew each time, except in ``bpe``.
    Raises :class:`DataError` if there is no text, or no space; :class:`InputError` for a ``vocab_size`` that does not
    hold what each kind begins with: all bytes, or all characters of the texts.
    """
    if kind == "bpe" and vocab_size < _LEAST_BPE:  # the library would make more ids than it is told
        raise _too_few(kind, vocab_size, "bytes", _LEAST_BPE)
    tokenizer, trainer = _untrained(kind, vocab_size)
    try:
        tokenizer.train_from_iterator(texts, trainer)
    except DataError:
        raise
    except Exception as cause:  # the library raises a bare Exception
        if str(cause).startswith(_TOO_SMALL):
            raise _too_few(kind, vocab_size, "characters of these texts") from cause
        raise DataError(f"no {kind} tokenizer could be trained", why=" ".join(str(cause).split())) from cause
    size = int(tokenizer.get_vocab_size(with_added_tokens=True))
    if size <= max(len(SPECIAL[kind]), 1):
        raise DataError("no tokenizer can be trained", why="the texts are empty")
    if size > vocab_size:
        raise _too_few(kind, vocab_size, "characters of these texts", size)
    try:
        with publishing(out) as (file,):
            file.write(to_json(tokenizer, pretty=True).encode())
    except OSError as cause:
        raise DataError(f"{out} cannot be written", why=cause.strerror or str(cause)) from cause
    return size


def _too_few(kind: str, vocab_size: int, what: str, least: int | None = None) -> InputError:
    """The error for a ``vocab_size`` below the ``least`` that is possible, which is not always known."""
    why = f"it begins with its special tokens and all {what}" + (f", {least} ids" if least else "")
    fix = f"type: --vocab-size {least}, or more" if least else "give a larger --vocab-size"
    return InputError(f"a {kind} tokenizer has more than {vocab_size} ids", why=why, fix=fix)


def _untrained(kind: str, vocab_size: int) -> tuple[Any, Any]:
    """The tokenizer of ``kind`` without a vocabulary, and its trainer."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    options: dict[str, Any] = {"vocab_size": vocab_size, "special_tokens": SPECIAL[kind], "show_progress": False}
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer, trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # no password
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        return tokenizer, trainers.WordPieceTrainer(**options)
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer, trainers.UnigramTrainer(unk_token="<unk>", **options)  # no password

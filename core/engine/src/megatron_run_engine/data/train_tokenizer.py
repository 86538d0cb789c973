"""Makes a tokenizer of texts, with the trainers of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_run.errors import DataError
from megatron_run_engine.data.user_cache import replacing

#: The kinds, in the order of a help text.
KINDS = ("bpe", "wordpiece", "unigram")
#: The special tokens of each kind, which get the first ids. The end of a document is among them.
SPECIAL = {
    "bpe": ["<|endoftext|>"],
    "wordpiece": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    "unigram": ["<unk>", "</s>"],
}


def train_tokenizer(texts: Iterable[str], kind: str, vocab_size: int, out: Path) -> int:
    """Write the tokenizer of ``kind`` that ``texts`` give to ``out``; return its number of ids, at most ``vocab_size``.

    ``bpe`` is GPT-2's, over bytes (Sennrich et al. 2016; Radford et al. 2019); ``wordpiece`` is BERT's for lower case
    (Schuster and Nakajima 2012); ``unigram`` is Kudo's (2018), as T5 has it. The library numbers words of equal
    frequency anew each time, except in ``bpe``.
    Raises :class:`DataError` if there is no text, or no space.
    """
    tokenizer, trainer = _untrained(kind, vocab_size)
    try:
        tokenizer.train_from_iterator(texts, trainer)
    except DataError:
        raise
    except Exception as cause:  # the library raises a bare Exception
        raise DataError(f"no {kind} tokenizer could be trained", why=" ".join(str(cause).split())) from cause
    size = int(tokenizer.get_vocab_size(with_added_tokens=True))
    if size <= max(len(SPECIAL[kind]), 1):
        raise DataError("no tokenizer can be trained", why="the texts are empty")
    try:
        with replacing(out) as file:
            file.write(tokenizer.to_str(pretty=True).encode())
    except OSError as cause:
        raise DataError(f"{out} cannot be written", why=cause.strerror or str(cause)) from cause
    return size


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

"""The section ``data``: datasets of a launch script, their split, the tokenizer and its ids, what ends a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_run.files.foreign_file import read_file
from megatron_run.files.safe_folder import parse_json
from megatron_run_format_megatron.launch_script.settings import Arguments, Setting, default_of

_GPT2 = "GPT2BPETokenizer"
#: Tokenizers with one vocabulary, and the number of its ids.
_SIZES = {_GPT2: 50257, "Llama2Tokenizer": 32000}
#: Why a vocabulary is as large as it is where no argument says how much of it is real.
WITH_PADDING = "with its padding: nothing tells it from the rest"
#: Tokenizers whose tokens are numbers already.
_NUMBERS = ("NullTokenizer", "NullMultimodalTokenizer")
_LARGEST = 256 << 20  # bytes of a tokenizer's file
_FILES = ("tokenizer_model", "vocab_file", "merge_file")
_SPLIT = (969.0, 30.0, 1.0)  # Megatron's default
#: The flags that need to know where documents end, and their keys.
_ENDS = {
    "eod_mask_loss": "mask_end",
    "reset_position_ids": "reset_positions",
    "reset_attention_mask": "reset_attention",
}


def find_vocabulary(arguments: Arguments) -> Setting | None:
    """The number of token ids: without padding if the arguments tell, else with padding, else None.

    A ``tokenizer.json`` that is here counts its own ids.
    """
    given = arguments.get
    kind, size, padded = given("tokenizer_type"), given("vocab_size"), given("padded_vocab_size")
    key, asked = "model.vocab_size", f"--tokenizer-type {kind}"
    if kind == _GPT2:
        return Setting(key, _SIZES[_GPT2], f"{asked}: GPT-2's")
    if size is not None:
        if kind in _NUMBERS:
            return Setting(key, size + 1, f"--vocab-size and the end of a document, {asked}")
        return Setting(key, size, "--vocab-size")
    if padded is not None:
        return Setting(key, padded, WITH_PADDING)
    if kind is None and given("merge_file"):
        return Setting(key, _SIZES[_GPT2], "--merge-file: GPT-2's")
    file = tokenizer_file(arguments)
    if file is not None and (counted := _ids(file)):
        return Setting(key, counted, f"--tokenizer-model: the ids of {file}")
    return Setting(key, _SIZES[kind], f"{asked}: Llama 2's") if kind in _SIZES else None


def last_token(arguments: Arguments) -> Setting | None:
    """The token that ends a document, where the flags tell: GPT-2's last id, or the id after those of the numbers."""
    vocabulary = find_vocabulary(arguments)
    stated = arguments.get("tokenizer_type") in _NUMBERS or (
        vocabulary is not None and vocabulary.why.endswith("GPT-2's")
    )
    if vocabulary is None or not stated or vocabulary.why == WITH_PADDING:
        return None
    return vocabulary._replace(value=vocabulary.value - 1)


def tokenizer_file(arguments: Arguments) -> Path | None:
    """The file of the `tokenizers` library that ``--tokenizer-model`` names, itself or by its folder, if it is here."""
    named = arguments.get("tokenizer_model")
    if not named:
        return None
    path = Path(str(named)).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    return file if file.suffix == ".json" and file.is_file() else None


def _ids(file: Path) -> int:
    """One more than the highest id in a tokenizer's file; 0 where it cannot be read."""
    try:
        content = parse_json(read_file(file, _LARGEST))
        ids = [token["id"] for token in content.get("added_tokens", [])]
        vocabulary = content["model"]["vocab"]
        ids += vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return max(ids, default=-1) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def tokenizer_notes(arguments: Arguments) -> Iterator[tuple[str, str]]:
    """The user's steps about a tokenizer: the flags as written, and the words. Nothing where there is none."""
    given = arguments.get
    flags, file = tokenizer_words(arguments), tokenizer_file(arguments)
    if given("tokenizer_type") in _NUMBERS or not flags:
        return
    if file is not None and not given("data_path"):
        yield flags, f"read by data.tokenizer={file}"
    elif file is None:
        yield flags, _how_to_tokenize(arguments)
    if find_vocabulary(arguments) is None:
        why = "the number of its ids is in its files, which are not here"
        yield flags, f"set model.vocab_size and data.vocab_size: {why}"


def _how_to_tokenize(arguments: Arguments) -> str:
    """The user's settings for a tokenizer that is not in one file of the `tokenizers` library."""
    vocabulary, merges = arguments.get("vocab_file"), arguments.get("merge_file")
    if not (vocabulary and merges):
        return "data.tokenizer takes tokenizer.json, vocab.json, vocab.txt and .model files"
    folder = Path(str(vocabulary)).parent
    if Path(str(vocabulary)) == folder / "vocab.json" and Path(str(merges)) == folder / "merges.txt":
        return f"set data.tokenizer={folder}"
    return "set data.tokenizer to a folder that has both as vocab.json and merges.txt"


def tokenizer_words(arguments: Arguments) -> str:
    """The flags of a tokenizer as written, but those for numbers; empty where there are none."""
    given = arguments.get
    kind = given("tokenizer_type")
    named = [f"--{name.replace('_', '-')} {given(name)}" for name in _FILES if given(name)]
    tiktoken = [f"--{name.replace('_', '-')} {value}" for name, value in arguments.items() if "tiktoken" in name]
    kinds = [f"--tokenizer-type {kind}"] if kind else []
    return " ".join([*kinds, *named, *tiktoken]) if kinds or named else ""


def data(arguments: Arguments) -> Iterator[Setting]:
    """The section ``data``: the datasets of ``--data-path`` in Megatron's order, mock data where it names none."""
    given = arguments.get
    named = None if given("mock_data") else given("data_path")
    if named:
        yield Setting("data.use", "indexed", "--data-path: .bin and .idx files")
        yield from _datasets(named, given("split"))
        if given("data_cache_path"):
            yield Setting("data.cache", given("data_cache_path"), "--data-cache-path")
        yield from _documents(arguments)
    else:
        why = "--mock-data" if given("mock_data") else "NOT YOUR DATA: name it in data.paths, with data.use=indexed"
        yield Setting("data.use", "mock", why)
    vocabulary = find_vocabulary(arguments)
    if vocabulary is not None:
        yield vocabulary._replace(key="data.vocab_size")


def _datasets(named: Sequence[str], split: Sequence[float] | None) -> Iterator[Setting]:
    paths, weights = blend(named)
    yield Setting("data.paths", paths, "--data-path")
    if weights:
        yield Setting("data.weights", weights, "--data-path: weights before the paths")
    shares = [int(share) if share == int(share) else share for share in split or _SPLIT]
    yield Setting("data.split", shares, "--split" if split else default_of("--split"))
    yield Setting("data.order", "megatron", "--data-path: the samples of GPTDataset, in its order")


def blend(named: Sequence[str]) -> tuple[list[str], list[float]]:
    """The paths and weights of ``--data-path``: ``0.7 a 0.3 b``, or paths alone, which have no weights."""
    try:
        weights = [float(weight) for weight in named[::2]]
    except ValueError:
        weights = []
    if not weights or len(named) % 2:
        return list(named), []
    return list(named[1::2]), weights


def _documents(arguments: Arguments) -> Iterator[Setting]:
    file = tokenizer_file(arguments)
    if file is not None:
        yield Setting("data.tokenizer", str(file), tokenizer_words(arguments))
    asked = [name for name in _ENDS if arguments.get(name)]
    for name in asked:
        yield Setting(f"data.{_ENDS[name]}", True, f"--{name.replace('_', '-')}")
    last = last_token(arguments)
    if asked and file is None and last is not None:
        yield last._replace(key="data.end_of_document")

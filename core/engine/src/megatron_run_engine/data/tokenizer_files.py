"""The forms in which tokenizers are kept, as tokenizers of the `tokenizers` library.

| form | read as |
|---|---|
| ``*.json`` | what the library has saved |
| ``vocab.json`` beside ``merges.txt`` | GPT-2's byte-level BPE |
| ``vocab.txt`` | BERT's WordPiece |
| ``*.model`` | SentencePiece, which its own library reads |
| a folder | what transformers says that its files mean (``tokenizer_folder``) |
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.errors import DataError
from megatron_run.errors.wording import advice, from_hub, near_path
from megatron_run.files.foreign_file import check_file, followed, read_file
from megatron_run.files.safe_folder import parse_json
from megatron_run_engine.data.tokenizer_folder import FolderTokenizer, files_decide, read_folder
from megatron_run_engine.data.tokenizer_folder.folder_files import LARGEST, not_read, read_tokenizer_file
from megatron_run_engine.data.tokenizer_folder.record import TOKENIZER, TOKENIZER_CONFIG
from megatron_run_engine.data.tokenizer_json import check_ids
from megatron_run_engine.data.user_files import refuse_pointer, start_of

if TYPE_CHECKING:
    import tokenizers

#: The files of a folder of Hugging Face's, in the order in which they are tried.
TOKENIZER_FILES = (TOKENIZER, "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
#: Files of other forms, as shell patterns: Mistral's and tiktoken's.
_OTHERS = ("tekken*.json", "*.tiktoken")
#: A line of tiktoken's form: a token in base 64 and its rank.
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
#: How a SentencePiece model's name ends.
SENTENCEPIECE = ".model"
#: Special tokens of BPE vocabularies, GPT-2's one and RoBERTa's, and those of BERT.
_END, _BPE = "<|endoftext|>", ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def find_file(path: Path) -> Path:
    """Return the file that ``path`` stands for: itself, or the tokenizer of a folder. ``merges.txt`` is its vocabulary.

    Raises :class:`DataError` if there is none.
    """
    if path.is_dir():
        for name in TOKENIZER_FILES:
            if (path / name).is_file():
                return _in_folder(path, name)
        others = sorted(each.name for pattern in _OTHERS for each in path.glob(pattern))
        why = f"{others[0]} has a form of its own, which the library tokenizers does not read" if others else ""
        raise _fault(
            f"folder {path} holds no tokenizer", why=why, fix=f"it would be one of {', '.join(TOKENIZER_FILES)}"
        )
    if path.name.endswith("merges.txt"):
        path = path.with_name(f"{path.name.removesuffix('merges.txt')}vocab.json")
    if not path.is_file():
        known = "name a tokenizer.json, a folder, vocab.json, vocab.txt or a .model file, or say bytes"
        raise _fault(f"tokenizer file {path} does not exist", fix=near_path(path) or advice(known, from_hub(path)))
    return _fetched(path)


def _in_folder(folder: Path, name: str) -> Path:
    """The file ``name`` of ``folder``. Raises :class:`DataError` for a link out of it."""
    try:
        followed(folder, name)
    except OSError as cause:
        raise not_read(folder / name, cause) from cause
    return _fetched(folder / name)


def _fetched(path: Path) -> Path:
    """``path``. Raises :class:`DataError` for no file, one that is too large, and a pointer that git-lfs has left."""
    try:
        check_file(path, LARGEST)
        refuse_pointer(path)
    except OSError as cause:
        raise not_read(path, cause) from cause
    except DataError as error:
        error.origin = "data.tokenizer"
        raise
    return path


def no_sentencepiece(path: Path, cause: Exception) -> DataError:
    """The error for a file that its library cannot read: Llama 3's ``tokenizer.model`` lists tokens and ranks."""
    if isinstance(cause, RuntimeError) and _TIKTOKEN.match(start_of(path)):
        why = "it has tiktoken's form, which says neither how texts are split nor special tokens"
        fix = "name a folder with tokenizer.json of the same model"
        return _fault(f"tokenizer file {path} is no SentencePiece model", why=why, fix=fix)
    return _fault(f"tokenizer file {path} is broken", why=" ".join(str(cause).split()))


def holds_tokenizer(folder: Path) -> bool:
    """Whether one of the files is in ``folder`` that tokenizers are kept in."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def find_tokenizer(path: Path) -> tuple[Path, FolderTokenizer | None]:
    """The file that ``path`` stands for, and what it means with the files beside it; None where it says all itself.

    A folder, and a file ``tokenizer.json``, mean what all files of the folder say together. Raises :class:`DataError`.
    """
    file = find_file(path)
    if (path.is_dir() or file.name == TOKENIZER) and files_decide(file.parent):
        return file, read_folder(file.parent)
    return file, None


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer, without the limits of length that its file may carry. Raises :class:`DataError`."""
    return opened(*find_tokenizer(path))


def _lacks_model(path: Path) -> bool:
    """Whether ``path`` is well-formed JSON, but of another kind than a tokenizer."""
    try:
        content = parse_json(read_tokenizer_file(path))
    except (DataError, ValueError):
        return False
    return not isinstance(content, dict) or "model" not in content


def opened(path: Path, folder: FolderTokenizer | None) -> tokenizers.Tokenizer:
    """The tokenizer that :func:`find_tokenizer` has found. Raises :class:`DataError`."""
    import tokenizers

    try:
        if folder is not None:
            tokenizer = tokenizers.Tokenizer.from_str(folder.backend)
            tokenizer.encode_special_tokens = folder.splits_special
        elif path.name.endswith("vocab.json"):
            tokenizer = _gpt2(path)
        elif path.suffix == ".txt":
            tokenizer = _bert(path)
        else:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        check_ids(tokenizer)
    except DataError:
        raise
    except Exception as cause:  # the library raises a bare Exception
        if path.suffix == ".json" and _lacks_model(path):
            raise _fault(f"{path} is no tokenizer", why="it is JSON without the key model") from cause
        raise _fault(f"tokenizer file {path} is broken", why=" ".join(str(cause).split())) from cause
    tokenizer.no_truncation()  # they would drop the rest of every document
    tokenizer.no_padding()
    return tokenizer


def _gpt2(vocabulary: Path) -> tokenizers.Tokenizer:
    """Byte-level BPE (Radford et al. 2019, section 2.2) of ``vocab.json`` and the ``merges.txt`` beside it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = vocabulary.with_name(f"{vocabulary.name.removesuffix('vocab.json')}merges.txt")
    if not merges.is_file():
        raise _fault(f"tokenizer file {vocabulary} has no {merges.name} beside it")
    _in_folder(merges.parent, merges.name)
    tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = (_END,) if tokenizer.token_to_id(_END) is not None else _BPE
    tokenizer.add_special_tokens([token for token in special if tokenizer.token_to_id(token) is not None])
    return tokenizer


def _bert(vocabulary: Path) -> tokenizers.Tokenizer:
    """WordPiece (Devlin et al. 2019) of ``vocab.txt``, one token a line.

    ``tokenizer_config.json`` beside it says whether text is put in lower case; without it, text is where no token of
    the vocabulary has a capital.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    model = models.WordPiece.from_file(str(vocabulary), unk_token="[UNK]", max_input_chars_per_word=100)
    tokenizer = Tokenizer(model)
    tokens = tokenizer.get_vocab()
    if "[UNK]" not in tokens:
        raise _fault(f"tokenizer file {vocabulary} is broken", why="it has no [UNK], as a WordPiece vocabulary has")
    lower = not any(token != token.lower() for token in tokens if not token.startswith("["))
    options: dict[str, Any] = {"do_lower_case": lower, **_options(vocabulary.with_name(TOKENIZER_CONFIG))}
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=bool(options["do_lower_case"]),
        strip_accents=options.get("strip_accents"),
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([token for token in _BERT if token in tokens])
    return tokenizer


def _options(path: Path) -> dict[str, Any]:
    """The content of a ``tokenizer_config.json``, empty without one."""
    if not path.is_file():
        return {}
    try:
        options = parse_json(read_file(_in_folder(path.parent, path.name)))
    except (OSError, ValueError) as cause:
        raise _fault(f"{path} is broken", why=str(cause)) from cause
    return options if isinstance(options, dict) else {}


def _fault(what: str, *, why: str = "", fix: str = "") -> DataError:
    return DataError(what, why=why, origin="data.tokenizer", fix=fix)

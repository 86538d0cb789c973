"""The files of a folder that transformers may read for its tokenizer, and the key of what they mean together."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path

from megatron_run.errors import DataError
from megatron_run.files.foreign_file import check_file, followed, read_file
from megatron_run_engine.data.tokenizer_folder.record import CHAT_TEMPLATE, DECIDING, TEMPLATES

#: The most bytes of a file.
LARGEST = 1 << 28
#: The names of files in which the classes of transformers keep vocabularies, as shell patterns. A folder's
#: configuration may name ``tokenizer.VERSION.json``, and any ``*.model`` may be its SentencePiece model.
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.*.json",
    "tekken*.json",
    "vocab.json",
    "vocab-*.json",
    "*_vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "tokenizer.model.*",
    "*.spm",
    "*.tiktoken",
    "bpe.codes",
    "dict.txt",
    "emoji.json",
    "byte_maps.json",
    "normalizer.json",
    "prophetnet.tokenizer",
    "word_shape.json",
    "word_pronunciation.json",
)


def is_tokenizer_file(name: str) -> bool:
    """Whether the file ``name``, a path below a tokenizer's folder with slashes, may have its say."""
    folder, slash, own = name.rpartition("/")
    if slash:
        return folder == TEMPLATES and fnmatchcase(own, "*.jinja")
    return any(fnmatchcase(name, pattern) for pattern in (*VOCABULARIES, *DECIDING))


def read_files(folder: Path) -> list[Path]:
    """The files of ``folder`` that may have their say. Raises :class:`DataError` for one that is no tokenizer's."""
    paths = (*folder.glob("*"), *folder.glob(f"{TEMPLATES}/*"))
    named = (path for path in paths if is_tokenizer_file(path.relative_to(folder).as_posix()))
    found = sorted(path for path in named if path.is_file())
    for path in found:
        try:
            check_file(followed(folder, str(path.relative_to(folder))), LARGEST)
        except OSError as cause:
            raise not_read(path, cause) from cause
    return found


def not_read(path: Path, cause: OSError) -> DataError:
    """The error of a tokenizer's file that is no file, is too large, or a link out of its folder."""
    fix = "put the file itself there, name the tokenizer's own file, or a folder without this one"
    return DataError(f"{path} is not read", why=cause.strerror or "", origin="data.tokenizer", fix=fix)


def read_tokenizer_file(path: Path) -> bytes:
    """The content of a tokenizer's own file. Raises :class:`DataError`."""
    try:
        return read_file(path, LARGEST)
    except OSError as cause:
        raise not_read(path, cause) from cause


def template_beside(file: Path) -> bytes | None:
    """The chat template in the folder of a tokenizer's ``file``, None without one. Raises :class:`DataError`."""
    path = file.with_name(CHAT_TEMPLATE)
    if not path.is_file():
        return None
    try:
        return read_file(followed(file.parent, CHAT_TEMPLATE), LARGEST)
    except OSError as cause:
        raise not_read(path, cause) from cause


def key(folder: Path, versions: Iterable[str]) -> str:
    """The name of what the files of ``folder`` mean to libraries of these ``versions``, as the code here reads it."""
    total = sha256(repr(tuple(versions)).encode())
    here = Path(__file__).parent
    for parent, paths in ((here, sorted(here.glob("*.py"))), (folder, read_files(folder))):
        for path in paths:
            content = read_tokenizer_file(path)
            total.update(f"{path.relative_to(parent)} {len(content)} ".encode())
            total.update(content)
    return total.hexdigest()[:32]

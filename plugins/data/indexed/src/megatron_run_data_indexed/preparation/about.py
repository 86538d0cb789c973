"""The content of ``PREFIX.json`` beside a prepared dataset: how it was made, and so whether a tokenizer fits it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.errors import DataError, refuse_taken, taken
from megatron_run.files.foreign_file import read_file
from megatron_run.files.publishing import half_named
from megatron_run.files.safe_folder import parse_json
from megatron_run_engine.data import Tokenizer, open_tokenizer
from megatron_run_engine.data.indexed_files import IndexedWriter, index_path, tokens_path
from megatron_run_engine.data.user_files import unreadable

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


def about_path(prefix: str | Path) -> Path:
    """Return ``<prefix>.json``, which says how a dataset was prepared."""
    return Path(f"{prefix}.json")


def refuse_dataset(prefix: Path, option: str, inputs: Collection[Path], *, overwrite: bool) -> None:
    """Raise :class:`InputError` for a dataset that exists, unless it may be replaced, and for one over an input."""
    if index_path(prefix).exists() and not overwrite:
        raise taken(f"the dataset {prefix}", option)
    paths = (tokens_path(prefix), about_path(prefix), index_path(prefix))
    unfinished = half_named(*paths)
    for path in paths:
        refuse_taken(path, option, overwrite=overwrite or path in unfinished, inputs=inputs)


@contextmanager
def writing(prefix: str | Path, dtype: DTypeLike, about: Callable[[], Mapping[str, Any]]) -> Iterator[IndexedWriter]:
    """A writer of the dataset ``prefix``, and of what ``about`` tells at the end: all appears, or nothing does."""
    with IndexedWriter(prefix, dtype, beside=about_path(prefix)) as writer:
        yield writer
        writer.write_beside(json.dumps(about(), indent=2).encode() + b"\n")


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the object in ``file``; None where there is none. Raises :class:`DataError` for what cannot be read."""
    try:
        found = parse_json(read_file(file))
    except (FileNotFoundError, ValueError):
        return None
    except OSError as cause:
        raise unreadable(file, cause) from cause
    return found if isinstance(found, dict) else None


def read_about(prefix: str | Path) -> Mapping[str, Any]:
    """Return how a dataset was prepared: tokenizer, vocabulary, inputs. Empty for one that something else made.

    Raises :class:`DataError` for a file of that name which says nothing: it may be a damaged one, and then nobody
    checks the tokenizer any more.
    """
    file = about_path(prefix)
    about = read_json(file)
    if about is None and file.exists():
        raise DataError(
            f"{file} does not say how the dataset beside it was prepared",
            why="it is damaged, or something else",
            fix="prepare the dataset again, or move the file elsewhere",
        )
    return about or {}


def ends_of(prefixes: Iterable[Path], usual: int | None) -> dict[int | None, Path]:
    """The tokens that end documents, each with a dataset in which it does: as recorded, else the ``usual`` one.

    None stands for documents that were prepared without one.
    """
    found = ((read_about(prefix).get("end_of_document", usual), prefix) for prefix in prefixes)
    return {end: prefix for end, prefix in found if end is None or isinstance(end, int)}


@dataclass(frozen=True)
class MadeWith:
    """The tokenizer that made a dataset: what ``open_tokenizer`` opens, which it was then, and its number of ids."""

    name: str
    identity: str
    vocab_size: int

    def fits(self, tokenizer: Tokenizer) -> bool:
        """Whether ``tokenizer`` reads the ids as they were written: it is the same, or has added tokens to it.

        Where the old one is not there any more, the number of ids decides.
        """
        if tokenizer.identity == self.identity:
            return True
        if tokenizer.vocab_size < self.vocab_size:
            return False
        try:
            return self.tokenizer().vocabulary.items() <= tokenizer.vocabulary.items()
        except DataError:
            return True

    def tokenizer(self) -> Tokenizer:
        """Open it where it was. Raises :class:`DataError` where it is not there, or another file is.

        Who wrote ``PREFIX.json`` may name any file of the reader's: none is used but the one that made the dataset.
        """
        found = open_tokenizer(self.name)
        if _contents(found.identity) != _contents(self.identity):
            why = "it has changed, or another file has its name"
            raise DataError(f"{self.name} is not the tokenizer that made the dataset", why=why, fix="add --tokenizer")
        return found


def _contents(identity: str) -> str:
    """The hash in the ``identity`` of a tokenizer, without the library that read it."""
    return identity.rpartition(" ")[2]


def made_with(prefix: Path) -> MadeWith | None:
    """The tokenizer of which ``PREFIX.json`` tells; None where nothing does."""
    fields = [read_about(prefix).get(key) for key in ("tokenizer", "identity", "vocab_size")]
    match fields:
        case [str(name), str(identity), int(vocab_size)]:
            return MadeWith(name, identity, vocab_size)
    return None

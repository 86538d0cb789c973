"""The formats in which models come and go: one row each. A new format is its own file and a row here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron_run.errors import CheckpointError, InputError, did_you_mean
from megatron_run_engine.formats import distributed, huggingface, megatron
from megatron_run_engine.formats.weights import Weights


class Format(NamedTuple):
    """One format, by the ``name`` that ``--from`` and ``--to`` take.

    ``files`` says in words what is in such a folder, and ``recognises`` looks for it. ``read`` gives the weights of a
    source, ``write`` fills a new and empty folder, where that way exists. ``unsafe`` says why reading executes what the
    files say, where it does: then the user must trust them in so many words. All raise a RunError.
    """

    name: str
    files: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path], Weights] | None = None
    write: Callable[[Weights, Path], None] | None = None
    unsafe: str = ""


FORMATS = (
    Format(
        "huggingface",
        "config.json and model.safetensors",
        huggingface.recognises,
        huggingface.read,
        huggingface.write,
    ),
    Format(
        "megatron",
        "latest_checkpointed_iteration.txt, or mp_rank_* or metadata.json and common.pt",
        megatron.recognises,
        megatron.read,
    ),
    Format(
        "distributed",
        ".metadata and megatron-run.json",
        distributed.recognises,
        distributed.read,
        distributed.write,
        unsafe="torch.distributed.checkpoint reads .metadata with pickle, which executes what the file says",
    ),
)


def readable() -> list[str]:
    """The names of the formats that can be imported."""
    return [each.name for each in FORMATS if each.read]


def writable() -> list[str]:
    """The names of the formats that can be exported to."""
    return [each.name for each in FORMATS if each.write]


def read_source(source: Path, name: str | None = None, *, trust_pickle: bool = False) -> tuple[str, Weights]:
    """The name of the format of ``source``, recognised from its files unless ``name`` says it, and its weights.

    Raises a RunError; a format that executes what it reads needs ``trust_pickle``.
    """
    if not source.exists():
        raise CheckpointError(f"there is no {source}")
    chosen = _named(name, readable()) if name else _recognised(source)
    if chosen.unsafe and not trust_pickle:
        raise CheckpointError(
            f"{source} is not read", why=chosen.unsafe, fix="if you trust whoever wrote it: --trust-pickle"
        )
    assert chosen.read is not None, "it is one of those that can be read"
    return chosen.name, chosen.read(source)


def writer(name: str) -> Callable[[Weights, Path], None]:
    """What writes the format ``name``. Raises :class:`InputError`."""
    write = _named(name, writable()).write
    assert write is not None, "it is one of those that can be written"
    return write


def _named(name: str, names: list[str]) -> Format:
    if name not in names:
        raise InputError(
            f"there is no format {name!r}", fix=did_you_mean(name, names) or f"known are {', '.join(names)}"
        )
    return next(each for each in FORMATS if each.name == name)


def _recognised(source: Path) -> Format:
    found = next((each for each in FORMATS if each.read and each.recognises(source)), None)
    if found is None:
        known = "; ".join(f"{each.name}: {each.files}" for each in FORMATS if each.read)
        raise CheckpointError(f"{source} is in no format that is known", why=known, fix="say which: --from FORMAT")
    return found

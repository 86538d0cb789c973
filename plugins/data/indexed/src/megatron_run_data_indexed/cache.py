"""Arrays that are computed once and then memory-mapped by every rank, in a folder keyed by what they were made from.

``<cache>/<key>/<name>.npy``. One process builds, under a lock that dies with it; the others wait and map. The folder
gets its name when its files are on disk, so a killed or concurrent build, or a file system without locks, leaves a
whole folder or none.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_run.errors import DataError
from megatron_run.files.foreign_file import check_file
from megatron_run.files.publishing import publishing_folder
from megatron_run.files.user_cache import locked, user_cache

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[Any]]

#: Part of every key: raise it when what is computed changes.
_VERSION = 1


def key(*parts: object) -> str:
    """Return the key of ``parts``: numbers, texts and arrays, which count with their contents."""
    total = sha256(repr(_VERSION).encode())
    for part in parts:
        if isinstance(part, np.ndarray):
            total.update(repr((part.dtype.str, part.shape)).encode())
            total.update(np.ascontiguousarray(part).data)
        else:
            total.update(repr(part).encode())
    return total.hexdigest()[:32]


def cached(
    folder: Path | None,
    name: str,
    arrays: Sequence[str],
    build: Callable[[], Sequence[NDArray[Any]]],
    fits: Callable[[Arrays], bool],
) -> Arrays:
    """Return the ``arrays`` of the entry ``name``, read-only and mapped, built by ``build`` if it is not there.

    One of which ``fits`` says that ``build`` cannot have made it is built again. The ``folder`` None is one in the
    user's cache. Raises :class:`DataError` for a folder in which nothing can be written or read.
    """
    entry = Path(name)
    try:
        folder = user_cache("indexed") if folder is None else folder
        entry = folder / name
        if (found := _mapped(entry, arrays, fits)) is not None:
            return found
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f"{name}.lock"):
            if (found := _mapped(entry, arrays, fits)) is not None:
                return found  # another rank has built it meanwhile
            shutil.rmtree(entry, ignore_errors=True)
            _write(entry, dict(zip(arrays, build(), strict=True)))
        made = _mapped(entry, arrays, fits)
    except OSError as cause:
        why = f"{cause.strerror or cause}: {cause.filename or entry}"
        raise DataError("the sample order cannot be cached", why=why, fix="set data.cache to another folder") from cause
    if made is None:
        raise DataError(f"{entry} is damaged", fix="remove it, or set data.cache to another folder")
    return made


def within(numbers: NDArray[Any], form: tuple[object, tuple[int, ...]], first: int, end: int) -> bool:
    """Whether ``numbers`` are of ``form``, kind and shape, and each is at least ``first`` and below ``end``."""
    if (numbers.dtype, numbers.shape) != form:
        return False
    return not numbers.size or (first <= int(numbers.min()) and int(numbers.max()) < end)


def _mapped(entry: Path, names: Sequence[str], fits: Callable[[Arrays], bool]) -> Arrays | None:
    """Return the arrays of ``entry``, None if one is missing, was cut short or does not fit."""
    try:
        paths = {name: entry / f"{name}.npy" for name in names}
        for path in paths.values():
            check_file(path)
        arrays = {name: np.asarray(np.load(path, mmap_mode="r")) for name, path in paths.items()}
        return arrays if fits(arrays) else None
    except OSError as cause:
        if isinstance(cause, FileNotFoundError):
            return None
        raise
    except Exception:  # of a damaged header, which is Python source, the library lets through what the parser raises
        return None


def _write(entry: Path, arrays: Arrays) -> None:
    """Write ``arrays`` as the new folder ``entry``."""
    with suppress(FileExistsError), publishing_folder(entry) as part:  # without locks another rank may be first
        for name, array in arrays.items():
            np.save(part / f"{name}.npy", array)

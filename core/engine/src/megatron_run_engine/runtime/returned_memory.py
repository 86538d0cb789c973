"""Host memory that goes back to the system when it is freed, in a process whose allocator keeps the rest.

Ranks on CPUs keep freed memory (``host.rank_environment``): activations come again in the same sizes, and new pages
cost time. Whole parameters on loan are too large for that, and so are those that a run builds to lend them: a gap that
one leaves is a few bytes too small for the next of the same size, as glibc aligns, and the process would grow by each.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: glibc's number of the option, and its usual value: how many blocks may be pages of their own (malloc.h).
_MMAP_MAX, _USUAL = -4, 65536


@contextmanager
def returned_when_freed(device: torch.device) -> Iterator[None]:
    """Within: what is allocated on ``device``, in large blocks, goes back to the system as soon as it is freed.

    Blocks of this may lie in each other: what the outermost one sets lasts until its end.
    """
    library = _keeping_library() if device.type == "cpu" and not _within else None
    if library is None:
        yield
        return
    library.mallopt(_MMAP_MAX, _USUAL)
    _within.append(True)
    try:
        yield
    finally:
        _within.pop()
        library.mallopt(_MMAP_MAX, 0)


#: Not empty within such a block.
_within: list[bool] = []


@cache
def _keeping_library() -> Any:
    """The C library if it keeps what is freed, as it was told when the process started; else None."""
    if "glibc.malloc.mmap_max=0" not in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    return ctypes.CDLL(None)

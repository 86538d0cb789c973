"""Notices that are told once in an environment; each leaves an empty file in the user's cache."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from hashlib import sha256

from megatron_run.planning.choosing import EnvironmentNotice
from megatron_run_engine.data.user_cache import user_cache


def untold(notices: Iterable[str]) -> Iterator[str]:
    """``notices`` without those about this environment that were told before; those that remain count as told."""
    for notice in notices:
        if not isinstance(notice, EnvironmentNotice) or _first_time(notice):
            yield notice


def _first_time(notice: str) -> bool:
    """Whether ``notice`` was not told yet in this environment; where nothing can be written it never was."""
    try:
        (user_cache("told") / sha256(f"{sys.prefix} {notice}".encode()).hexdigest()[:16]).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # a home that cannot be written, or none
        return True
    return True

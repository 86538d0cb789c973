"""The folder in which this user's machine keeps what can be made again.

Many processes may start at once, and any of them may be killed: a lock is lifted when its holder dies.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_run.files.publishing import publishing


def user_cache(name: str) -> Path:
    """Return the folder ``name`` of this user's cache: ``$XDG_CACHE_HOME/megatron-run``, else in ``~/.cache``.

    It is made if it does not exist. Raises :class:`OSError` if it cannot be, or if anybody else may write there.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        root = (named if named.is_absolute() else Path.home() / ".cache") / "megatron-run"
    except RuntimeError as cause:  # an account without a home
        raise FileNotFoundError(f"{cause} Set XDG_CACHE_HOME.") from cause
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{root} is no folder of this user alone: chmod go-w it, or set XDG_CACHE_HOME")
    folder = root / name
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def cached(name: str, file: str) -> Path | None:
    """Where ``file`` lies in the folder ``name`` of the cache, or would; None without a cache."""
    try:
        return user_cache(name) / file
    except OSError:
        return None


#: Nanoseconds for which the clock of a file system may stand still: a younger file can change unseen.
YOUNG = 2_000_000_000
#: The variable by which torch is told where compiled libraries are kept, and how its own choice begins.
COMPILED, _SHARED = "TORCHINDUCTOR_CACHE_DIR", "torchinductor_"


def keep_compiled(environment: MutableMapping[str, str]) -> None:
    """Let torch's compiler keep libraries, and load them, in this user's cache, unless the user named a folder.

    torch's own choice is a name in the shared temporary folder that anybody can guess, and make first: what lies there
    is executed. Raises :class:`OSError` as :func:`user_cache` does.
    """
    named = Path(environment.get(COMPILED, ""))
    guessed = named.name.startswith(_SHARED) and named.parent == Path(tempfile.gettempdir())
    if not named.is_absolute() or guessed:  # torch writes its choice into the variable once it is imported
        environment[COMPILED] = str(user_cache("inductor"))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock ``path``, which other processes of this machine wait for. Raises :class:`OSError` without it."""
    with path.open("w", encoding="utf-8") as file:
        with suppress(OSError):  # a file system without locks: several processes write, and one result is kept
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def keep(path: Path, content: bytes) -> None:
    """Make ``content`` the file ``path`` of the cache, whichever processes do so at once.

    A file that has it already is not written again. Raises :class:`OSError`.
    """
    if not path.is_file() or path.read_bytes() != content:
        with publishing(path, durable=False) as (file,):
            file.write(content)

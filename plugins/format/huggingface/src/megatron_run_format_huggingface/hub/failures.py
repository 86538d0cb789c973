"""Failures of the Hub, each in one line with what to type."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from megatron_run.errors import DataError, InputError, PluginError, RunError
from megatron_run.errors.install_hint import how_to_add
from megatron_run_format_huggingface.hub.names import DATASET, HubName

#: How to show who one is.
LOGIN = "type hf auth login, or set HF_TOKEN"
#: Statuses of who is not known, and of who may not.
_UNKNOWN, _FORBIDDEN = 401, 403
_ABSENT = "{} is not in the cache, or not all that is read of it"


@contextmanager
def in_one_line(asked: HubName) -> Iterator[None]:
    """Within: what the library raises about ``asked`` becomes a :class:`RunError` of one line; it tells nothing itself.

    No message of the library's is passed on: it has addresses in it.
    """
    try:
        with _quiet():
            yield
    except RunError:
        raise
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] != "huggingface_hub":
            raise
        fix = f"type: {how_to_add('megatron-run-format-huggingface', 'hub')}"
        raise PluginError(f"{asked} needs huggingface_hub", why="it is not installed", fix=fix) from cause
    except Exception as cause:
        known = (_of_library(asked, each) or _of_connection(asked, each) for each in (cause, *_causes(cause)))
        found = next(filter(None, known), None)
        if found is None:
            raise
        raise found from cause


@contextmanager
def _quiet() -> Iterator[None]:
    """Within: the library tells errors alone, which we raise. It leaves neither a connection nor a thread.

    Ranks may be forked from this process, which would lack the thread that watches over bars.
    """
    from huggingface_hub import close_session
    from huggingface_hub.utils import tqdm

    logger, watched = logging.getLogger("huggingface_hub"), tqdm.monitor is not None
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with bars(shown=sys.stderr.isatty()):
            yield
    finally:
        logger.setLevel(level)
        close_session()
        if tqdm.monitor is not None and not watched:
            tqdm.monitor.exit()
            tqdm.monitor = None


@contextmanager
def bars(*, shown: bool) -> Iterator[None]:
    """Within: the library shows bars as before, or hides them."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hides = not (shown or are_progress_bars_disabled())
    if hides:
        disable_progress_bars()
    try:
        yield
    finally:
        if hides:
            enable_progress_bars()


def _of_library(asked: HubName, cause: Exception) -> RunError | None:
    """The error for what the Hub has answered, or the cache lacks."""
    from huggingface_hub import errors, get_token

    where = f"{'datasets/' if asked.kind == DATASET else ''}{asked.repository} at {host()}"
    status = getattr(getattr(cause, "response", None), "status_code", None)
    known = get_token() is not None
    match cause:
        case errors.GatedRepoError():
            why = "its owner lets in who has asked" + ("" if known else ", and no token says who you are")
            return DataError(f"{asked} is gated", why=why, fix=f"ask for {where}" + ("" if known else f", and {LOGIN}"))
        case errors.RevisionNotFoundError():
            return DataError(f"{asked.repository} has no revision {asked.revision or 'main'}", fix=f"look at {where}")
        case errors.RepositoryNotFoundError():
            why = "there is none of that name" + (", or your token does not see it" if known else ", or it is private")
            return DataError(f"{asked} is not on the Hub", why=why, fix=f"look at {where}" if known else LOGIN)
        case errors.HFValidationError():
            return InputError(f"{asked} is no name of the Hub", fix="type hf:ORG/NAME")
        case errors.LocalEntryNotFoundError():
            chain = [*_causes(cause)]
            if answered := next((each for each in chain if isinstance(each, errors.HfHubHTTPError)), None):
                return _of_library(asked, answered)
            what = _ABSENT.format(asked)
            off = any(isinstance(each, errors.OfflineModeIsEnabled) for each in chain)
            why = "HF_HUB_OFFLINE is set" if off else f"{host()} cannot be reached"
            again = "unset it" if off else "try again with a network"
            return DataError(what, why=why, fix=f"{again}, or set HF_HOME to where it was fetched")
        case errors.HfHubHTTPError():
            refused = status in (_UNKNOWN, _FORBIDDEN)
            why = f"{host()} answered {status}"
            return DataError(
                f"{asked} is refused" if refused else f"{asked} failed", why=why, fix=LOGIN if refused else "try again"
            )
    return None


def _causes(error: BaseException) -> Iterator[Exception]:
    """The causes of ``error``, the nearest first."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
        yield error


def _of_connection(asked: HubName, cause: Exception) -> RunError | None:
    """The error for a connection that broke off, and for a cache that cannot be written.

    The library of HTTP is one of two, whose names differ.
    """
    if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, ConnectionError):
        return no_room(asked, cause.strerror or str(cause))
    of_http = type(cause).__module__.partition(".")[0].startswith(("httpx", "httpcore"))
    if of_http or isinstance(cause, OSError) or type(cause).__name__ == "XetDownloadError":
        fix = "type it again: the files that came whole are there"
        return DataError(f"{asked} broke off", why=f"the connection to {host()} did not hold", fix=fix)
    return None


@contextmanager
def of_cache(asked: HubName) -> Iterator[None]:
    """Within: what a repository seems to lack, it may lack in the cache alone, whose library kept no list of it."""
    try:
        yield
    except DataError as error:
        why = f"{host()} was not asked, and {error}"
        raise DataError(_ABSENT.format(asked), why=why, fix="try again with a network") from error


def no_room(asked: HubName, why: str = "") -> RunError:
    """The error for a cache that cannot be written."""
    fix = "set HF_HOME to a folder that you can write, with room"
    return DataError(f"the cache cannot keep {asked}", why=why, fix=fix)


def host() -> str:
    """The Hub's host, without what else its address may hold."""
    from huggingface_hub import constants

    found = urlsplit(constants.ENDPOINT)
    return f"{found.hostname}:{found.port}" if found.port else str(found.hostname)

"""What is installed, and the checkout, stay as they are while tests run: they are read once for all that resolve."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import Distribution
from types import ModuleType
from unittest import mock

from megatron_run.registry import discover
from megatron_run.registry.load import load
from tests.support.checkout import ROOT

#: By folder of metadata and group what it offers, and what is wrong with it; by package the digest of its sources.
_OFFERS: dict[tuple[str, str], tuple[list[discover._Offer], list[str]]] = {}
_DIGESTS: dict[ModuleType, str] = {}


@contextmanager
def read_once() -> Iterator[None]:
    """Within: metadata of this environment and digests of this checkout are kept. What a test writes is read anew."""
    readable, digest = discover._readable, discover._digest
    environment, checkout = sysconfig.get_path("purelib"), str(ROOT)

    def offers(found: Iterable[Distribution], group: str, notices: list[str]) -> Iterator[discover._Offer]:
        for distribution in found:
            folder = str(getattr(distribution, "_path", ""))
            if not folder.startswith(environment):
                yield from readable([distribution], group, notices)
                continue
            if (folder, group) not in _OFFERS:
                said: list[str] = []
                _OFFERS[folder, group] = (list(readable([distribution], group, said)), said)
            notices += _OFFERS[folder, group][1]
            yield from _OFFERS[folder, group][0]

    def digest_once(package: ModuleType) -> str:
        if package not in _DIGESTS and str(getattr(package, "__file__", "")).startswith(checkout):
            _DIGESTS[package] = digest(package)
        return _DIGESTS.get(package) or digest(package)

    with mock.patch.multiple(discover, _readable=offers, _digest=digest_once):
        yield


@contextmanager
def found_once() -> Iterator[None]:
    """Within: nothing is installed, and each plugin is loaded once. For ranks that resolve many runs."""
    loaded = cache(load)
    with (
        read_once(),
        mock.patch("megatron_run.planning.resolver.scan", cache(discover.scan)),
        mock.patch("megatron_run.planning.choosing.load", lambda entry, origin, digests: loaded(entry, origin)),
    ):
        yield

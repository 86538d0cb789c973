"""What is installed stays so while tests run: who resolves a hundred runs need not read it a hundred times."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from types import ModuleType

import pytest

from megatron_run.registry import discover
from tests.support.checkout import ROOT

#: By folder of metadata what it offers, and what is wrong with it.
_OFFERS: dict[str, tuple[list[discover._Offer], list[str]]] = {}
_DIGESTS: dict[ModuleType, str] = {}


@pytest.fixture(scope="module", autouse=True)
def _installed_is_read_once() -> Iterator[None]:
    """Metadata of this environment and digests of this checkout are kept; a folder that a test writes is read anew."""
    readable, digest = discover._readable, discover._digest
    environment, checkout = sysconfig.get_path("purelib"), str(ROOT)

    def read_once(found: Iterable[Distribution], notices: list[str]) -> Iterator[discover._Offer]:
        for distribution in found:
            folder = str(getattr(distribution, "_path", ""))
            if not folder.startswith(environment):
                yield from readable([distribution], notices)
                continue
            if folder not in _OFFERS:
                said: list[str] = []
                _OFFERS[folder] = (list(readable([distribution], said)), said)
            notices += _OFFERS[folder][1]
            yield from _OFFERS[folder][0]

    def digest_once(package: ModuleType) -> str:
        if not str(package.__file__).startswith(checkout):
            return digest(package)
        if package not in _DIGESTS:
            _DIGESTS[package] = digest(package)
        return _DIGESTS[package]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discover, "_readable", read_once)
        patch.setattr(discover, "_digest", digest_once)
        yield

"""What is installed, and the checkout, stay as they are while tests run: they are read once for all that resolve."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from importlib.metadata import Distribution
from types import ModuleType
from unittest import mock

from packaging.requirements import Requirement
from pluggy import PluginManager

from megatron_run.config.yaml import Node, parse
from megatron_run.registry import discover
from megatron_run.registry.hooks import registered
from megatron_run.registry.load import load
from tests.support.checkout import ROOT

#: By folder of metadata and group what it offers, and what is wrong with it; by package the digest of its sources.
_OFFERS: dict[tuple[str, str], tuple[list[discover._Offer], list[str]]] = {}
_DIGESTS: dict[ModuleType, str] = {}
#: By module, its name as a plugin and the hooks that it has just then.
_REGISTERED: dict[tuple[ModuleType, str, tuple[object, ...]], PluginManager] = {}

_parsed = cache(parse)
_requirement = cache(Requirement)


@contextmanager
def read_once() -> Iterator[None]:
    """Within: metadata of this environment, digests and hooks of this checkout, and presets as data are kept.

    What a test writes, or puts in the place of a hook, is read anew.
    """
    readable, digest, environment = discover._readable, discover._digest, sysconfig.get_path("purelib")

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
        if package not in _DIGESTS and _is_ours(package):
            _DIGESTS[package] = digest(package)
        return _DIGESTS.get(package) or digest(package)

    with (
        mock.patch.multiple(discover, _readable=offers, _digest=digest_once, Requirement=_requirement),
        mock.patch("megatron_run.registry.load.registered", _registered_once),
        mock.patch("megatron_run.config.sources.parse", _parse_once),
    ):
        yield


def _registered_once(holder: object, name: str) -> PluginManager:
    if not (isinstance(holder, ModuleType) and _is_ours(holder)):
        return registered(holder, name)
    key = holder, name, tuple(each for hook, each in vars(holder).items() if hook.startswith("megatron_run_"))
    if key not in _REGISTERED:
        _REGISTERED[key] = registered(holder, name)
    return _REGISTERED[key]


def _parse_once(text: str, name: str) -> dict[str, Node]:
    return deepcopy(_parsed(text, name)) if name.startswith("preset:") else parse(text, name)


def _is_ours(module: ModuleType) -> bool:
    return str(getattr(module, "__file__", "")).startswith(str(ROOT))


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

"""A loaded plugin: its description, where it came from, its factory; and in words how it breaks its contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron_run.config.fields import groups_with_defaults
from megatron_run.contracts import (
    DataSource,
    Format,
    GraphCapture,
    Model,
    Observer,
    Optimizer,
    ParallelLayers,
    Scaler,
    Schedule,
)
from megatron_run.contracts.plugin import KINDS, RUN_KINDS, PluginInfo
from megatron_run.errors import PluginError, RunError, let_end
from megatron_run.errors.install_hint import check_engine
from megatron_run.registry.hooks import in_one_line, said_type
from megatron_run.registry.known import known_plugin

if TYPE_CHECKING:
    from megatron_run.contracts.schema import Config
    from megatron_run.registry.discover import Entry


#: What the factory of each kind must return.
CONTRACTS: Mapping[str, type] = MappingProxyType(
    {
        "scaler": Scaler,
        "optimizer": Optimizer,
        "schedule": Schedule,
        "parallel-layer": ParallelLayers,
        "graph-capture": GraphCapture,
        "model": Model,
        "data": DataSource,
        "observer": Observer,
        "format": Format,
    }
)


def factory_hook(kind: str) -> str:
    """The name of the hook that makes objects of ``kind``."""
    return f"megatron_run_create_{kind.replace('-', '_')}"


class NoOptions(BaseModel):
    """The options of a plugin that has none: every key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class UncheckedOptions(BaseModel):
    """The options of a plugin that could not be loaded, as they were written."""

    model_config = ConfigDict(frozen=True, extra="allow")


@dataclass(frozen=True)
class Plugin:
    """One chosen plugin, imported and checked.

    ``origin`` says why it won. ``options`` are set by :meth:`with_options` once the configuration is resolved.
    ``digest`` is the SHA-256 of its source files, which all ranks compare. ``location`` is the file it was imported
    from. ``factory`` is its hook. ``entry`` is what it was loaded by, None for an object of the caller's.
    """

    kind: str
    name: str
    distribution: str
    version: str
    origin: str
    info: PluginInfo
    digest: str
    location: str
    factory: Callable[..., object] = field(repr=False, compare=False)
    options: BaseModel | None = None
    entry: Entry | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.kind}={self.name}"

    @property
    def source(self) -> str:
        """Where it comes from, for messages: ``acme-zigzag 0.3.0``, or a path."""
        return f"{self.distribution} {self.version}" if self.distribution else self.location

    @property
    def reference(self) -> str:
        """The word that chooses it on the command line, after ``KIND=``: its name, or the path of a single file."""
        return self.name if self.distribution else self.location

    @property
    def options_model(self) -> type[BaseModel]:
        """The model that validates its options; one without fields when it has none."""
        return self.info.options or NoOptions

    @property
    def provides(self) -> frozenset[str]:
        """Its abilities, with ``kind=name``, which every plugin has."""
        return self.info.provides | {str(self)}

    @property
    def loaded(self) -> bool:
        """Whether it was imported; False for a stand-in made by :func:`unloaded`."""
        return self.options_model is not UncheckedOptions

    def takes(self, argument: str) -> bool:
        """Whether its factory hook asks for ``argument``; False for what is no hook."""
        asked = getattr(self.factory, "get_hookimpls", None)
        return asked is not None and any(argument in hook.argnames for hook in asked())

    def with_options(self, options: BaseModel) -> Plugin:
        """The same plugin with validated ``options``."""
        return replace(self, options=options)

    def create(self, **arguments: object) -> Any:
        """Call the factory hook and return its object, which is an instance of the kind's contract.

        ``arguments`` are those of the hook (``context``, ``base``) besides the options. Raises :class:`PluginError`
        naming plugin, hook and difference; a :class:`RunError` of the plugin's own passes unchanged.
        """
        options, hook = self._options(), factory_hook(self.kind)
        try:
            made = self.factory(options=options, **arguments)
        except RunError:
            raise
        except BaseException as cause:
            let_end(cause)
            check_engine(cause, f"plugin {self} of {self.source} cannot be made", self.origin)
            raise self.failed(hook, in_one_line(cause)) from cause
        contract = CONTRACTS[self.kind]
        if not isinstance(made, contract):
            wanted = f"megatron_run.contracts.{contract.__name__}"
            raise self.failed(hook, f"it returned {said_type(made)}, and must return a {wanted}")
        return made

    def check_config(self, config: Config) -> tuple[str, ...]:
        """The plugin's notices about a run of ``config``, one line each.

        Raises a :class:`RunError` when it cannot be part of that run.
        """
        if self.info.check_config is None:
            return ()
        try:
            notices = self.info.check_config(config, self._options())
            said = () if isinstance(notices, str) else tuple(notices)
        except RunError:
            raise
        except (Exception, SystemExit) as cause:
            raise self.failed("check_config", in_one_line(cause)) from cause
        if isinstance(notices, str) or not all(isinstance(notice, str) for notice in said):
            raise self.failed("check_config", f"it returned {notices!r}, and must return texts")
        return said

    def check_device(self, device: str) -> None:
        """Raise a :class:`RunError` when the plugin, as it is set, cannot run on ``device``: ``cpu`` or ``cuda:0``."""
        if self.info.check_device is None:
            return
        try:
            self.info.check_device(device, self._options())
        except RunError as error:
            error.origin = error.origin or self.origin
            raise
        except (Exception, SystemExit) as cause:
            raise self.failed("check_device", in_one_line(cause)) from cause

    def failed(self, what: str, why: str) -> PluginError:
        """The error of ``what`` this plugin did: a hook or a method of its object."""
        return PluginError(
            f"plugin {self} of {self.source}: {what} failed",
            why=why,
            origin=self.origin,
            fix=f"choose another {self.kind}, or see the whole cause with --debug",
        )

    def _options(self) -> BaseModel:
        if self.options is not None:
            return self.options
        try:
            return self.options_model()
        except ValidationError as cause:
            missing = ", ".join(str(error["loc"][0]) for error in cause.errors())
            raise PluginError(f"plugin {self} cannot be made without the options {missing}") from cause


def unloaded(kind: str, name: str, origin: str, entry: Entry | None, missing: PluginError) -> Plugin:
    """A stand-in for ``kind=name``, which was not loaded: the engine is missing, or its file must not be run.

    A run that has one cannot train. It provides and suggests what the kernel knows the plugin to, keeps its options
    unchecked, and raises ``missing`` when its object is asked for. ``entry`` is None if it is not installed.
    """
    known = known_plugin(kind, name)

    def refuse(**_arguments: object) -> object:
        raise missing

    return Plugin(
        kind=kind,
        name=name,
        distribution=entry.distribution if entry else "",
        version=entry.version if entry else "",
        origin=origin,
        info=PluginInfo(
            kind,
            name,
            options=UncheckedOptions,
            provides=known.provides if known else frozenset(),
            suggests=known.suggests if known else {},
        ),
        digest="",
        location=entry.location if entry else "not installed",
        factory=refuse,
        entry=entry,
    )


#: Fields of PluginInfo and the type each must have.
_INFO_TYPES: Mapping[str, type] = {
    "kind": str,
    "name": str,
    "api": int,
    "provides": frozenset,
    "requires": frozenset,
    "conflicts": frozenset,
    "suggests": Mapping,
    "suggests_with": Mapping,
    "state_version": int,
}

#: Optional fields of PluginInfo that are functions of two arguments: what the first argument is.
_CHECKS: Mapping[str, str] = {"check_config": "the configuration", "check_device": "the device"}


def info_difference(info: object, kind: str, name: str) -> str:
    """How the answer to ``megatron_run_plugin_info`` is wrong for ``kind=name``, or an empty string."""
    if not isinstance(info, PluginInfo):
        return f"returned {said_type(info)}, and must return a megatron_run.PluginInfo"
    for attribute, wanted in _INFO_TYPES.items():
        if not isinstance(value := getattr(info, attribute), wanted):
            return f"says {attribute}={value!r}, which must be a {wanted.__name__}"
    for attribute, given in _CHECKS.items():
        check = getattr(info, attribute)
        if check is not None and not _takes_two(check):
            return f"says {attribute}={check!r}, which must be a function of {given} and the options, or None"
    if (info.kind, info.name) != (kind, name):
        return f"says {info.kind}={info.name}, and it was chosen as {kind}={name}"
    if info.api > KINDS[kind]:
        return f"says api={info.api}, and this kernel knows {kind} up to api={KINDS[kind]}: a newer kernel is needed"
    if kind not in RUN_KINDS and info.options is not None:
        return f"says options={info.options!r}, and a {kind} has none: nothing could set them"
    return _options_difference(info.options) or _costs_difference(kind, info.options)


def _costs_difference(kind: str, options: type[BaseModel] | None) -> str:
    """How the options of a model fail to tell its costs."""
    if kind != "model" or callable(getattr(options, "costs", None)):
        return ""
    said = options.__name__ if options else None
    return f"says options={said}, which must have a method costs(sequence_length, vocab_size) -> ModelCosts"


def _options_difference(options: object) -> str:
    if options is None:
        return ""
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        return f"says options={options!r}, which must be a pydantic BaseModel class"
    if not options.model_config.get("frozen") or options.model_config.get("extra") != "forbid":
        return f'says options={options.__name__}, which must set ConfigDict(frozen=True, extra="forbid")'
    if group := next(groups_with_defaults(options), ""):
        why = "setting one of its keys would change the others"
        return f"says options={options.__name__}, whose group {group} has a default of its own: {why}"
    return ""


def _takes_two(function: object) -> bool:
    try:
        inspect.signature(function).bind(None, None)  # type: ignore[arg-type]  # what is no function raises
    except (TypeError, ValueError):
        return False
    return True

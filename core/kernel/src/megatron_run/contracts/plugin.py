"""The description that every plugin gives of itself, and the kinds of plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_run.errors import InputError
from megatron_run.errors.wording import advice, did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel

    from megatron_run.contracts.schema import Config

#: The kinds, in the order in which a run reports them, with the version of each kind's contract.
KINDS: Mapping[str, int] = MappingProxyType(
    {
        "scaler": 1,
        "optimizer": 1,
        "schedule": 1,
        "parallel-layer": 1,
        "graph-capture": 1,
        "model": 1,
        "data": 1,
        "observer": 1,
        "format": 1,
    }
)
#: The kinds of which a run chooses plugins: each is a section of a configuration. A format serves one conversion.
RUN_KINDS = tuple(kind for kind in KINDS if kind != "format")
#: What a package may offer besides plugins: commands of ``megatron-run``. A command has no PluginInfo, and no options.
COMMAND = "command"
#: Kinds of which a run may choose several plugins, and what separates their names.
SEPARATORS: Mapping[str, str] = MappingProxyType({"parallel-layer": "+", "observer": ","})


def check_kind(name: str, origin: str, kinds: Iterable[str] = tuple(KINDS)) -> str:
    """The kind called ``name``; ``parallel_layer`` is read as ``parallel-layer``. Raises :class:`InputError`.

    The error for an unknown one lists ``kinds``, which may hold ``command`` too.
    """
    kind = name.replace("_", "-")
    if kind not in (*KINDS, *kinds):
        listed = f"the kinds are {', '.join(kinds)}"
        raise InputError(f"unknown kind {name!r}", origin=origin, fix=advice(did_you_mean(kind, kinds), listed))
    return kind


def check_run_kind(name: str, origin: str) -> str:
    """The kind called ``name``, which a run can choose. Raises :class:`InputError`."""
    kind = check_kind(name, origin, RUN_KINDS)
    if kind not in RUN_KINDS:
        raise InputError(
            f"a run chooses no {kind}",
            why=f"a {kind} serves one conversion",
            origin=origin,
            fix="type megatron-run import SOURCE FOLDER --from NAME, or export SOURCE FOLDER --to NAME",
        )
    return kind


def entry_point_group(kind: str) -> str:
    """The entry-point group of ``kind``, or of commands: ``parallel-layer`` -> ``megatron_run.parallel_layer``."""
    return f"megatron_run.{kind.replace('-', '_')}"


@dataclass(frozen=True)
class PluginInfo:
    """A plugin's description of itself, the result of ``megatron_run_plugin_info``.

    ``kind`` and ``name`` repeat the entry point. ``api`` is the version of the kind's contract that the plugin was
    written for. ``options`` is a frozen pydantic model, or None if there is nothing to set.

    ``provides`` and ``requires`` are abilities: a configuration key that the plugin serves when it is above 1
    (``parallel.pipeline``), a setting that it serves (``train.precision=fp16``), or any word two plugins agree on; each
    plugin provides ``kind=name`` without saying so. A format provides ``import``, ``export`` or ``launch-script``.
    ``conflicts`` are abilities that must not be present. ``suggests`` are configuration values that the plugin would
    like where the user said nothing (interleaved: two stages with two chunks each); ``suggests_with`` adds some where
    an option of the plugin has a certain value: ``{"variant=v": {"parallel.chunks": 2}}``. ``decides`` are options of
    the plugin, None by default, that a run without them decides when it begins, and then keeps: today's date.

    Layers that provide ``parallel.tensor`` or ``parallel.context`` are built once on the meta device, for any value of
    that key, before anything is started or written. So their errors are reported early.

    ``check_config(config, options)`` is called wherever a run is planned, with the whole configuration, resolved and
    otherwise valid. It returns notices for the user, one line each, such as an option without effect. For an impossible
    configuration it raises :class:`megatron_run.errors.RunError`; the origin of each key named in the error is added.

    ``check_device(device, options)`` is called with the device of a rank, ``cpu`` or ``cuda:N``. It raises
    :class:`megatron_run.errors.RunError` if the plugin cannot run there with these options. Check for optional
    libraries here, so that the plugin can be listed and explained without them. Each rank calls it before there is a
    process group; our launcher calls it for its ranks before a run folder is created. It may query a GPU, but must not
    allocate memory there.

    ``state_version`` is the version of the state that a scaler or an optimizer saves; increase it when the same names
    change their meaning. ``upgrade_state(state, from_version)`` converts the state saved by an older version of the
    plugin. For a scaler, ``state`` is the result of ``Scaler.state_dict``. For an optimizer, it holds the fields of one
    logical tensor by name, the weights ``master`` among them, as tensors on the host that must not be modified. Fields
    with one value per weight come as equal boxes, which may be any part of the tensor; other fields, such as the step
    count, come whole.

    Example::

        PluginInfo("schedule", "mine", provides=frozenset({"parallel.pipeline"}), suggests={"parallel.pipeline": 2})
    """

    kind: str
    name: str
    api: int = 1
    options: type[BaseModel] | None = None
    provides: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()
    suggests: Mapping[str, Any] = field(default_factory=dict)
    suggests_with: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    decides: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    check_config: Callable[[Config, Any], Iterable[str]] | None = None
    check_device: Callable[[str, Any], None] | None = None
    state_version: int = 1
    upgrade_state: Callable[[Mapping[str, Any], int], Mapping[str, Any]] | None = None

"""Options that have another value without another meaning: nothing reads them, or they follow from others.

A width that is unset and the same one written out, the router of a model without experts: options say themselves what
they mean (:class:`megatron_run.contracts.option_groups.SaysExplicit`). A run goes on with such a change without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from megatron_run.config.origin import KIND_SECTIONS
from megatron_run.config.values import flat, nested
from megatron_run.contracts.model import MAX_LAYERS
from megatron_run.contracts.option_groups import SaysExplicit
from megatron_run.planning.choosing import dumped

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun
    from megatron_run.registry.loaded_plugin import Plugin


def idle_keys(before: Mapping[str, Any], run: ResolvedRun, differing: Collection[str]) -> frozenset[str]:
    """Those of the ``differing`` keys whose values ``before`` mean what those of ``run`` do."""
    return frozenset(
        key
        for section in {key.partition(".")[0] for key in differing} & set(KIND_SECTIONS)
        for key in _idle_of(section, before, run.one(KIND_SECTIONS[section]), differing)
    )


def _idle_of(section: str, before: Mapping[str, Any], plugin: Plugin, differing: Collection[str]) -> Iterable[str]:
    own = [key for key in differing if key.startswith(f"{section}.")]
    if f"{section}.use" in own or not isinstance(plugin.options, SaysExplicit):
        return ()
    now, values = plugin.options.explicit(), {f"{section}.{key}": each for key, each in flat(dumped(plugin)).items()}

    def means_the_same(keys: Collection[str]) -> bool:
        return _explicit(plugin, section, _replaced(values, before, keys)) == now

    if means_the_same(own):
        return own
    return [key for key in own if len(own) > 1 and means_the_same([key])]


def _replaced(now: Mapping[str, Any], before: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """``now`` with what ``before`` has for ``keys``: a value, or none."""
    kept = {key: value for key, value in now.items() if not any(f"{key}.".startswith(f"{each}.") for each in keys)}
    found = {key: before[key] for key in keys if key in before}
    return {key: value for key, value in kept.items() if not any(each.startswith(f"{key}.") for each in found)} | found


def _explicit(plugin: Plugin, section: str, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The meaning of the options with ``values``.

    None where the values are no valid options, or name more layers than can be planned: the meaning lists a number for
    each layer.
    """
    try:
        options = plugin.options_model.model_validate(nested(values).get(section, {}))
    except ValidationError:
        return None
    layers = getattr(options, "num_layers", None)
    if isinstance(layers, int) and layers > MAX_LAYERS:
        return None
    return options.explicit() if isinstance(options, SaysExplicit) else None

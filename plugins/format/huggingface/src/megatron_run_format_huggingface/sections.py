"""Sections of tables that several families share: rotations, windows by layer, an activation's name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_run_format_huggingface.family import Config, Section, must_be

#: Their numbers of each way in which rotations stretch, and our options.
_LENGTH = "original_max_position_embeddings"
_SOME = {"factor": "rope.factor", _LENGTH: "rope.original_length"}
_SIZE = {"attention_factor": "rope.attention_factor"}
_SCALING: Mapping[str, Mapping[str, str]] = {
    "linear": {"factor": "rope.factor"},
    "llama3": {**_SOME, "low_freq_factor": "rope.low_freq", "high_freq_factor": "rope.high_freq"},
    "yarn": {**_SOME, "beta_slow": "rope.low_freq", "beta_fast": "rope.high_freq", **_SIZE},
    "longrope": {**_SOME, "short_factor": "rope.short_factors", "long_factor": "rope.long_factors", **_SIZE},
}
SLIDING, FULL = "sliding_attention", "full_attention"


def rope(
    theta: float = 10000.0,
    fraction: float | None = None,
    theta_key: str = "rope_theta",
    fraction_key: str = "partial_rotary_factor",
    kinds: Sequence[str] = ("default", *_SCALING),
    length_key: str = "",
) -> Section:
    """Rotary positions with these defaults, and these keys beside them; ``kinds`` are the scalings of the family.

    ``fraction`` None: the family rotates all features of a head, whatever a ``partial_rotary_factor`` says, which its
    code in ``transformers`` does not read. ``length_key`` is where a family has the original length, too.
    """

    def found_in(config: Config) -> dict[str, Any]:
        inner = config.get("rope_scaling") or config.get("rope_parameters") or {}
        beside = {"rope_theta": config.get(theta_key), "partial_rotary_factor": config.get(fraction_key)}
        usual = {"rope_theta": theta, "partial_rotary_factor": fraction}
        return rotation({**usual, **{key: value for key, value in beside.items() if value is not None}, **inner})

    def read(config: Config) -> dict[str, Any]:
        found = found_in(config)
        part = {} if fraction is None else {"rope.fraction": float(found["partial_rotary_factor"])}
        return {**scaled(found, config), **part}

    def write(options: Config) -> dict[str, Any]:
        found = written(options)
        beside = {theta_key: options["rope.theta"]}  # where older versions of transformers look
        if fraction is not None and (fraction, options["rope.fraction"]) != (1, 1):
            beside[fraction_key] = found["partial_rotary_factor"] = options["rope.fraction"]
        if length_key and _LENGTH in found:
            beside[length_key] = found[_LENGTH]
        return {**beside, "rope_parameters": found}

    def unsupported(config: Config) -> list[str]:
        found = found_in(config)
        part, kind = found.get("partial_rotary_factor"), found["rope_type"]
        stretched = fraction is None and part not in (None, 1) and kind != "default"  # their own code fails there
        return unscalable(found, kinds) + [f"partial_rotary_factor={part} (only 1 with rope_type={kind!r})"] * stretched

    return Section(read, write, unsupported)


def rotation(found: Config) -> dict[str, Any]:
    """The content of a ``rope_parameters``, ``rope_type`` under its name of today."""
    return {**found, "rope_type": found.get("rope_type", found.get("type", "default"))}


def unscalable(found: Config, kinds: Sequence[str] = ("default", *_SCALING)) -> list[str]:
    """Every reason why the :func:`rotation` in ``found`` has no counterpart."""
    if found["rope_type"] == "dynamic":
        return ["rope_type='dynamic' (angles that change with the length of each text)"]
    return must_be(found, {"rope_type": tuple(kinds), "truncate": (None, True)})


def scaled(found: Config, config: Config) -> dict[str, Any]:
    """Our options of the :func:`rotation` in ``found``; ``config`` has the lengths that it leaves out."""
    options = {
        "position": "rope",
        "rope.theta": found["rope_theta"],
    }
    kind = found["rope_type"]
    if kind == "default":
        return options
    numbers = {_LENGTH: config.get("max_position_embeddings"), **found}
    if config.get(_LENGTH):  # where Phi-3 has it
        numbers[_LENGTH] = config[_LENGTH]
    values = {option: numbers.get(key) for key, option in _SCALING.get(kind, {}).items()}
    if kind in ("yarn", "longrope") and not values["rope.factor"]:
        values["rope.factor"] = max(1.0, config["max_position_embeddings"] / values["rope.original_length"])
    if kind == "yarn":
        values["rope.attention_factor"] = values["rope.attention_factor"] or _yarn_size(numbers, values["rope.factor"])
    said = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return {**options, "rope.scaling": kind, **{key: value for key, value in said.items() if value is not None}}


def _yarn_size(numbers: Config, factor: Any) -> float:
    """The factor on queries and keys, where ``attention_factor`` does not say it."""
    every, some = numbers.get("mscale_all_dim"), numbers.get("mscale")
    if every and some:
        return float((0.1 * some * math.log(factor) + 1) / (0.1 * every * math.log(factor) + 1))
    return 0.1 * math.log(factor) + 1


def written(options: Config) -> dict[str, Any]:
    """Their ``rope_parameters`` of our explicit options."""
    kind = options["rope.scaling"]
    found = {"rope_type": kind or "default", "rope_theta": options["rope.theta"]}
    values = {key: options[option] for key, option in _SCALING.get(kind or "", {}).items()}
    return found | {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def windows(usual: Callable[[Config, int], bool], switch: Mapping[bool, Mapping[str, Any]] | None = None) -> Section:
    """Windows by layer: ``layer_types``, or where they are missing those that ``usual(config, layer)`` says.

    ``switch`` are the keys that a model with a window has besides, and those of one without.
    """

    def types(config: Config) -> list[bool]:
        kinds = config.get("layer_types")
        layers = range(config["num_hidden_layers"])
        return [usual(config, layer) for layer in layers] if kinds is None else [kind == SLIDING for kind in kinds]

    def read(config: Config) -> dict[str, Any]:
        off = switch is not None and not config.get("use_sliding_window", False)
        window, pattern = config.get("sliding_window"), types(config)
        if off or window is None or not any(pattern):
            return {}
        return {"attention.window": window, "attention.window_pattern": tuple(map(int, pattern))}

    def write(options: Config) -> dict[str, Any]:
        pattern, window = options["attention.window_pattern"], options["attention.window"]
        found: dict[str, Any] = {"layer_types": [SLIDING if each else FULL for each in pattern]}
        if (
            window is not None
        ):  # some families' code makes the mask of a window, of its default, also where none is used
            found["sliding_window"] = window
        return found | dict(switch[window is not None] if switch else {})

    def unsupported(config: Config) -> list[str]:
        kinds = config.get("layer_types") or []
        return [f"layer_types has {kind!r} (only {SLIDING!r} or {FULL!r})" for kind in {*kinds} - {SLIDING, FULL}]

    return Section(read, write, unsupported)


def activation(key: str, names: Mapping[str, str]) -> Section:
    """Our activation by their name, which their ``key`` holds; of several names for one, an export takes the first."""
    foreign = {logical: name for name, logical in reversed(tuple(names.items()))}
    return Section(
        lambda config: {"activation": names[config[key]]},
        lambda options: {key: foreign.get(options["activation"], next(iter(names)))},
        lambda config: must_be(config, {key: tuple(names)}),
    )

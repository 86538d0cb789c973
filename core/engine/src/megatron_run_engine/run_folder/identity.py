"""The identity of a run: the configuration keys that must not change between its attempts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from megatron_run.planning.run import leaves, sections

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun

#: Sections that decide what is learned. The others (run, parallel, eval, guard, schedule, parallel_layer,
#: graph_capture, observer) decide where and how fast it runs and what is observed. They may change between attempts:
#: losses then agree to rounding.
LEARNED = ("version", "model", "train", "data", "optimizer", "scaler")
#: Keys of those sections that do not change what is learned: limits, counters, communication and memory.
_NOT_LEARNED = frozenset(
    {
        "train.max_skips",
        "train.recompute",
        "train.count_zeros",
        "optimizer.bucket_size",
        "optimizer.overlap_grad_reduce",
        "optimizer.overlap_param_gather",
    }
)
#: Kinds that save state. Whether another plugin can read that state is decided when a checkpoint is resumed.
STATEFUL = ("optimizer", "scaler")


def identity(run: ResolvedRun) -> dict[str, Any]:
    """Return every dotted key that decides what is learned, with its resolved value, as plain JSON."""
    everything = sections(run)
    chosen = {name: everything[name] for name in LEARNED}
    keys = {".".join(key): value for key, value in leaves(chosen)}
    return {key: value for key, value in keys.items() if key not in _NOT_LEARNED}


def digest(keys: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an identity in hexadecimal."""
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()


def differing_keys(before: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str] = ()) -> list[str]:
    """Return one text ``key=before, now now`` for each key that differs, in order of name.

    For a kind in ``STATEFUL`` another plugin is no difference, nor are options that only one of the two plugins has.
    Keys of the kinds in ``allowed`` never differ.
    """
    differing = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    changed = [kind for kind in STATEFUL if f"{kind}.use" in differing]
    return [
        f"{key}={_text(before, key)}, now {_text(now, key)}"
        for key in differing
        if not _is_free(key, changed, allowed, both=key in before and key in now)
    ]


def _is_free(key: str, changed: Collection[str], allowed: Collection[str], *, both: bool) -> bool:
    """Whether ``key`` may differ."""
    section, _, name = key.partition(".")
    return section in allowed or (section in changed and (name == "use" or not both))


def _text(keys: Mapping[str, Any], key: str) -> str:
    return str(keys[key]) if key in keys else "unset"

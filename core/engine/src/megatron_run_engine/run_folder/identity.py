"""What makes two runs the same run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from megatron_run.planning.run import leaves, sections

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun

#: Sections that say what is learned. The others (run, parallel, eval, guard, schedule, parallel_layer, graph_capture,
#: observer) say where, how fast and who watches: they may change between attempts, and losses agree to rounding.
LEARNED = ("version", "model", "train", "data", "optimizer", "scaler")
#: Keys of those sections that say when to give up, what is counted and how memory is spent, not what is learned.
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
#: Kinds that save state. Whether another plugin can go on from it is decided where the state is looked at.
STATEFUL = ("optimizer", "scaler")


def identity(run: ResolvedRun) -> dict[str, Any]:
    """Every dotted key that decides what is learned, with its resolved value; plain JSON."""
    everything = sections(run)
    chosen = {name: everything[name] for name in LEARNED}
    keys = {".".join(key): value for key, value in leaves(chosen)}
    return {key: value for key, value in keys.items() if key not in _NOT_LEARNED}


def digest(keys: Mapping[str, Any]) -> str:
    """SHA-256 of an identity, in hexadecimal."""
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()


def differing_keys(before: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str] = ()) -> list[str]:
    """One ``key=before, now now`` text for each key that is not the same in both, in order of name.

    Another plugin of a kind in ``STATEFUL`` is no difference by itself, nor are options that only one of the two has.
    Nothing of the kinds in ``allowed`` is a difference.
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

"""Why replicas may differ, and what to type: hardware has failed, or a plugin leaves out a sum over ranks."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

from megatron_run.registry.known import known_plugin

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from megatron_run.registry.loaded_plugin import Plugin

#: The kinds whose plugins compute gradients and updates, and so must sum them over the ranks that hold copies.
_KINDS = ("optimizer", "parallel-layer", "model")
#: From so many differing tensors on it is no flipped bit, which spoils one tensor.
MANY = 4


#: What fails of a machine where copies differ.
HARDWARE = "a memory, a link or a kernel failed"


class Cause(NamedTuple):
    """Why copies may differ, and what to type; ``accuses``: plugins, rather than a machine."""

    why: str
    fix: str
    accuses: bool = False


class _Suspect(NamedTuple):
    name: str  # with where it comes from
    checked: str  # what ``plugins check`` takes
    foreign: bool  # not of this project


def likely_cause(
    plugins: Mapping[str, tuple[Plugin, ...]], differing: int, *, first: bool, repeats: bool = False
) -> Cause:
    """The cause of ``differing`` tensors in a run of ``plugins``; ``first``: no comparison before found them equal.

    ``repeats``: every rank came to the same weights again, as it does by its program.

    Plugins of this project are tested on ranks, so they are suspected only where too many tensors differ for a single
    hardware fault. Any other plugin is likelier to be wrong than a machine is to fail.
    """
    suspects = list(_suspects(plugins))
    accused = [suspect for suspect in suspects if suspect.foreign]
    if not accused and (repeats or (first and differing >= MANY)):
        accused = suspects
    if not accused:
        fix = "run again to resume from the last saved step; leave that machine out if it happens there again"
        return Cause(HARDWARE, fix)
    names = " or ".join(suspect.name for suspect in accused)
    checks = " and ".join(f"megatron-run plugins check {quote(suspect.checked)}" for suspect in accused)
    why = f"{names} may leave out a sum over ranks; else {HARDWARE}{', and fails alike each time' * repeats}"
    return Cause(
        why, f"type {checks}; if all is well there, run again to resume from the last saved step", accuses=True
    )


def _suspects(plugins: Mapping[str, tuple[Plugin, ...]]) -> Iterator[_Suspect]:
    for kind in _KINDS:
        chosen = plugins.get(kind, ())
        for number, plugin in enumerate(chosen, 1):
            known = known_plugin(kind, plugin.name)
            foreign = known is None or known.distribution != plugin.distribution
            # Layers are tried on top of those below them, as they are trained.
            stack = chosen[:number] if kind == "parallel-layer" else [plugin]
            reference = "+".join(each.reference for each in stack)
            yield _Suspect(f"{plugin} of {plugin.source}", f"{kind}={reference}", foreign)

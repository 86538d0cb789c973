"""Every side of the comparison, by name; what a side needs is imported when it is made, for its memory is measured."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.single.model import PRECISIONS, Precision, Side, Weights
from benchmarks.support import megatron
from benchmarks.support.shape import Shape

TRAINER, BARE, NANOGPT = "megatron-run", "bare loop, same modules", "nanoGPT"
TANH, ERF, MEGATRON = "Hugging Face, its tanh GELU", "Hugging Face, erf GELU", megatron.NAME
#: The peers that must be installed first -> what they are called where they are missing.
OPTIONAL = {TANH: "transformers", ERF: "transformers", MEGATRON: megatron.NAME}


def installed(name: str) -> bool:
    """Whether side ``name`` can be made here."""
    return megatron.installed() if name == MEGATRON else name not in OPTIONAL or find_spec(OPTIONAL[name]) is not None


def names() -> list[str]:
    """The sides that can be made here."""
    return [name for name in (TRAINER, BARE, NANOGPT, TANH, ERF, MEGATRON) if installed(name)]


def keys() -> Iterator[tuple[str, Precision]]:
    """Every side that can be made here, in both precisions."""
    return ((name, precision) for precision in PRECISIONS for name in names())


def make_side(name: str, shape: Shape, precision: Precision, weights: Weights | None = None) -> Side:
    """Side ``name``. Ours start from weights of their own, the peers from ``weights``, or from any."""
    if name in (TRAINER, BARE):
        from benchmarks.single.ours import BareLoop, OurTraining

        return OurTraining(shape, precision) if name == TRAINER else BareLoop(shape, precision)
    if name == NANOGPT:
        from benchmarks.single.peers.nanogpt import nanogpt

        return nanogpt(shape, weights, precision)
    if name == MEGATRON:
        from benchmarks.single.peers.megatron import MegatronLoop

        return MegatronLoop(shape, weights, precision)
    from benchmarks.single.peers.huggingface import huggingface

    return huggingface(shape, weights, precision, activation="gelu_new" if name == TANH else "gelu")

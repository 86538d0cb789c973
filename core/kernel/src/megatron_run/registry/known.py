"""First-party plugins that may not be installed: for hints only, never for a decision."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A first-party package. ``provides`` as in PluginInfo; ``available`` is false while it is only planned.

    ``options`` are the names of its options, for who sets one while another plugin of the kind is chosen; all or none.
    """

    kind: str
    name: str
    available: bool = False
    provides: frozenset[str] = frozenset()
    options: tuple[str, ...] = ()

    @property
    def distribution(self) -> str:
        """The distribution's name, derived from kind and name."""
        return f"megatron-run-{self.kind}-{self.name}"

    @property
    def how_to_get(self) -> str:
        """What to type, or that there is nothing to type yet."""
        if self.available:
            return f"pip install {self.distribution}"
        return f"{self.distribution} is planned, not yet released"


_FP16 = frozenset({"train.precision=fp16"})
_DYNAMIC = (
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
    "growth_factor",
    "backoff_factor",
)
_UPDATE = ("rule", "betas", "eps", "momentum", "nesterov", "rule_options", "adamw_for", "lr_mult", "grad_dtype")
_ZERO1 = (*_UPDATE, "bucket_size", "overlap_grad_reduce", "overlap_param_gather")
_DEEPSPEED = (
    "stage",
    "rule",
    "betas",
    "eps",
    "momentum",
    "nesterov",
    "lr_mult",
    "reduce_bucket_size",
    "use_multi_rank_bucket_allreduce",
)
_PIPELINE = frozenset({"parallel.pipeline"})
_CHUNKED = frozenset({"parallel.pipeline", "parallel.chunks"})
_TENSOR = frozenset({"parallel.tensor", "parallel.sequence"})

KNOWN: tuple[Known, ...] = (
    Known("scaler", "dynamic", available=True, provides=_FP16, options=_DYNAMIC),
    Known("scaler", "constant", available=True, provides=_FP16, options=("loss_scale",)),
    Known("optimizer", "zero1", available=True, options=_ZERO1),
    Known("optimizer", "deepspeed", available=True, options=_DEEPSPEED),
    Known("schedule", "1f1b", available=True, provides=_PIPELINE),
    Known("schedule", "interleaved", available=True, provides=_CHUNKED, options=("group_size",)),
    Known("schedule", "gpipe", available=True, provides=_CHUNKED),
    Known("schedule", "zero-bubble", available=True, provides=_CHUNKED, options=("variant",)),
    Known("parallel-layer", "tensor", available=True, provides=_TENSOR, options=("overlap",)),
    Known("parallel-layer", "te", available=True, provides=_TENSOR),
    Known("graph-capture", "partial", available=True),
    Known("graph-capture", "te", available=True),
    Known("model", "bert"),
    Known("data", "indexed"),
    Known("observer", "tensorboard", available=True),
    Known("observer", "trace", available=True),
    Known("format", "huggingface", available=True, provides=frozenset({"import", "export"})),
    Known("format", "megatron", available=True, provides=frozenset({"import", "launch-script"})),
    Known("format", "distributed", available=True, provides=frozenset({"import", "export"})),
)


def known_plugin(kind: str, name: str) -> Known | None:
    """The first-party package of that kind and name, installed or not."""
    return next((known for known in KNOWN if (known.kind, known.name) == (kind, name)), None)


def known_owners(kind: str, option: str) -> tuple[Known, ...]:
    """First-party packages of ``kind`` that exist and have ``option``."""
    return tuple(known for known in KNOWN if known.kind == kind and known.available and option in known.options)


def known_providers(ability: str) -> tuple[Known, ...]:
    """First-party packages that provide ``ability``, those that exist before those that are planned."""
    providers = (known for known in KNOWN if ability in known.provides)
    return tuple(sorted(providers, key=lambda known: not known.available))

"""``adapter_config.json``: what low-rank adapters do, both ways.

An adapter of rank r adds ``scale B A`` to its matrix, where ``scale`` is ``lora_alpha / r``, or by its root where
``use_rslora`` says so. A matrix may have an r and a ``lora_alpha`` of its own, by the end of its module's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_run.errors import CheckpointError
from megatron_run_format_huggingface.family import must_be
from megatron_run_format_huggingface.hub.names import at_home
from megatron_run_format_huggingface.model_folder import CONFIG as MODEL_CONFIG

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import AdapterWeights, Weights


#: The file's name.
CONFIG = "adapter_config.json"
#: What does not change what adapters compute. The tensors say which modules have some; how these began is past.
_FREE = frozenset(
    {
        "auto_mapping",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "target_modules",
        "task_type",
    }
)
_READ = frozenset({"r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern"})
#: Keys that are read too, each with the type of its values but null, and that type in words. PEFT itself takes any
#: value for a truth value, so that what is neither true nor false must not pass for false.
_TYPED: Mapping[str, tuple[type, str]] = {
    "base_model_name_or_path": (str, "a text"),
    "use_rslora": (bool, "true or false"),
}
#: Keys whose other values have no counterpart here. Other ways to begin change the frozen weights.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
#: No rank and no alpha is as great.
_MOST = 1 << 31
#: A key of a pattern that is a name, and not a regular expression, which is not run. A ``^`` begins a whole name.
_NAME = re.compile(r"\^?[\w.-]+")


class AdapterConfig(NamedTuple):
    """The content of the file: the frozen model, and ranks and alphas, also of modules by the ends of their names."""

    base: str
    rank: int
    alpha: float
    dropout: float
    rooted: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """The rank of the adapter of ``module``."""
        return next((rank for end, rank in self.ranks.items() if _ends(module, end)), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of the adapter of ``module``."""
        alpha = next((alpha for end, alpha in self.alphas.items() if _ends(module, end)), self.alpha)
        return self._scale(alpha, self.rank_of(module))

    @property
    def scale(self) -> float:
        """The factor of the adapters of modules without numbers of their own."""
        return self._scale(self.alpha, self.rank)

    def _scale(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.rooted else rank)


class Written(NamedTuple):
    """Adapters by their names in the file, the rank of each adapted module, and all ``modules`` of the model.

    ``transposed`` says that their matrices are [i, o], as GPT-2's; A and B are not.
    """

    tensors: Mapping[str, Tensor]
    ranks: Mapping[str, int]
    modules: Sequence[str]
    transposed: bool


def _ends(module: str, end: str) -> bool:
    return module == end[1:] if end.startswith("^") else f".{module}".endswith(f".{end}")


def read(found: Mapping[str, Any], path: Path) -> AdapterConfig:
    """``found``, the content of ``path``. Raises :class:`CheckpointError` with every key that decides."""
    reasons = list(_unsupported(found))
    if reasons:
        raise CheckpointError(f"{path.parent} holds adapters of another kind than here", why="; ".join(reasons))
    described = AdapterConfig(
        base=found.get("base_model_name_or_path") or "",
        rank=found.get("r", 8),
        alpha=found.get("lora_alpha", 8),
        dropout=found.get("lora_dropout", 0.0),
        rooted=found.get("use_rslora") or False,
        ranks=found.get("rank_pattern") or {},
        alphas=found.get("alpha_pattern") or {},
    )
    if faults := list(_faults(described)):
        raise CheckpointError(f"{path} cannot be used", why="; ".join(faults))
    return described


def _unsupported(found: Mapping[str, Any]) -> Iterator[str]:
    """Keys with a value that has no counterpart, those of later versions too: what is empty asks for nothing."""
    yield from must_be({"bias": "none", "init_lora_weights": True, **found}, _ONLY)
    for key, (kind, meaning) in _TYPED.items():
        if found.get(key) is not None and not isinstance(found[key], kind):
            yield f"{key}={found[key]!r} (only {meaning})"
    for key, value in found.items():
        if key not in {*_FREE, *_READ, *_TYPED, *_ONLY} and value not in (None, False, "", [], {}):
            yield f"{key}={value!r} (only unset)"
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = found.get(key) or {}
        if not isinstance(pattern, dict) or not all(_NAME.fullmatch(end) for end in pattern):
            yield f"{key}={pattern!r} (only names of modules or their ends)"


def _faults(described: AdapterConfig) -> Iterator[str]:
    for rank in (described.rank, *described.ranks.values()):
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank < _MOST:
            yield f"a rank is {rank!r}"
    for alpha in (described.alpha, *described.alphas.values()):
        if not _is_number(alpha) or alpha == 0:
            yield f"an alpha is {alpha!r}"
    if not _is_number(described.dropout) or not 0 <= described.dropout < 1:
        yield f"lora_dropout is {described.dropout!r}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST < value < _MOST


def write(weights: Weights, adapters: AdapterWeights, written: Written) -> dict[str, Any]:
    """The content of the file for ``written`` adapters. It names a model that was imported from such a folder."""
    how = adapters.how
    adapted = _shortest(written.ranks, (name for name in written.modules if name not in written.ranks))
    ranks: dict[str, int] = {}
    for rank in sorted({*written.ranks.values()} - {how.rank}):
        own = [name for name, other in written.ranks.items() if other == rank]
        ranks |= dict.fromkeys(_shortest(own, written.ranks.keys() - own), rank)
    return {
        "peft_type": "LORA",
        "task_type": None if weights.config.get("use") == "bert" else "CAUSAL_LM",
        **_base(adapters.base if MODEL_CONFIG in weights.files else ""),
        "inference_mode": True,
        "r": how.rank,
        "lora_alpha": _alpha(how.scale, how.rank),
        "lora_dropout": how.dropout,
        "rank_pattern": ranks,
        "alpha_pattern": {end: _alpha(how.scale, rank) for end, rank in ranks.items()},
        "target_modules": adapted,
        "fan_in_fan_out": written.transposed,
        "bias": "none",
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
    }


def _base(base: str) -> dict[str, str | None]:
    """The model that is adapted: its name on the Hub and its commit, where it came from there, else its path."""
    named = at_home(Path(base))
    if named is None:
        return {"base_model_name_or_path": base or None}
    return {"base_model_name_or_path": named.repository, "revision": named.revision}


def _alpha(scale: float, rank: int) -> float:
    """The number that gives ``scale`` over ``rank``, a whole one if there is one."""
    alpha = scale * rank
    return round(alpha) if round(alpha) / rank == scale else alpha


def _shortest(modules: Iterable[str], others: Iterable[str]) -> list[str]:
    """The shortest ends of ``modules``, at dots, that are the end of none of ``others``; sorted."""
    taken = {end for other in others for end in _ends_of(other)}
    return sorted({next(end for end in _ends_of(module) if end not in taken) for module in modules})


def _ends_of(module: str) -> Iterator[str]:
    words = module.split(".")
    return (".".join(words[start:]) for start in range(len(words) - 1, -1, -1))

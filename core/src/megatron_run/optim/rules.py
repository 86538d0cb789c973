"""Update rules by name: PyTorch's optimizers, applied to flat segments of the master weights.

AdamW: Loshchilov and Hutter 2019; Adam: Kingma and Ba 2015; Muon: Jordan et al. 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from megatron_run.errors import InputError, advice, did_you_mean

if TYPE_CHECKING:
    from megatron_run.optim.options import UpdateOptions

#: The rules with a name of their own.
NAMES = ("adamw", "adam", "sgd", "muon")
_MUON_MOMENTUM = 0.95  # of its authors and of PyTorch


@dataclass(frozen=True)
class UpdateRule:
    """A class of ``torch.optim`` with its arguments.

    ``whole``: it must see each logical tensor whole and in its shape; else it treats every value alike, and may be
    given any range of a buffer. ``rest`` is the rule for what this one cannot update: all but hidden matrices.
    """

    kind: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    whole: bool = False
    rest: UpdateRule | None = None

    def make(self, groups: list[dict[str, Any]], device: torch.device) -> torch.optim.Optimizer:
        """The optimizer of ``groups``, with PyTorch's fused kernel where the rule asks for it and ``device`` has it."""
        arguments = dict(self.arguments)
        if device.type == "meta":
            arguments.pop("fused", None)
        made: torch.optim.Optimizer = self.kind(groups, **arguments)
        return made


def find_rule(options: UpdateOptions) -> UpdateRule:
    """The rule that ``options`` ask for. Raises :class:`InputError` for one that does not exist."""
    more = options.rule_options
    adamw = UpdateRule(torch.optim.AdamW, {"betas": options.betas, "eps": options.eps, "fused": True, **more})
    match options.rule:
        case "adamw":
            return adamw
        case "adam":
            return UpdateRule(torch.optim.Adam, adamw.arguments)
        case "sgd":
            momentum = options.momentum or 0.0
            return UpdateRule(
                torch.optim.SGD, {"momentum": momentum, "nesterov": options.nesterov, "fused": True, **more}
            )
        case "muon":
            return _muon(options)
        case name:
            return UpdateRule(_import(name), more, whole=True)


def _muon(options: UpdateOptions) -> UpdateRule:
    """Muon for hidden matrices, AdamW for the rest."""
    kind = getattr(torch.optim, "Muon", None)
    if kind is None:
        raise InputError(
            f"optimizer.rule=muon needs a newer torch than {torch.__version__}", fix="upgrade torch, or choose adamw"
        )
    momentum = _MUON_MOMENTUM if options.momentum is None else options.momentum
    rest = UpdateRule(torch.optim.AdamW, {"betas": options.betas, "eps": options.eps, "fused": True})
    return UpdateRule(kind, {"momentum": momentum, **options.rule_options}, whole=True, rest=rest)


def _import(name: str) -> type[torch.optim.Optimizer]:
    module, _, attribute = name.partition(":")
    if not attribute:
        listed = f"the rules are {', '.join(NAMES)}, or MODULE:CLASS"
        raise InputError(f"unknown optimizer.rule {name!r}", fix=advice(did_you_mean(name, NAMES), listed))
    try:
        kind = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"optimizer.rule={name} cannot be imported", why=str(error), fix="install it") from error
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise InputError(f"optimizer.rule={name} is no torch.optim.Optimizer", fix="name a subclass of it")
    return kind

"""Update rules by name: PyTorch's optimizers, applied to flat stretches of the master weights.

AdamW: Loshchilov and Hutter 2019; Adam: Kingma and Ba 2015; Muon: Jordan et al. 2024.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from inspect import signature, unwrap
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from megatron_run.contracts.meaning import FIXED, NOT_LEARNED
from megatron_run.contracts.option_groups import OF_FILES
from megatron_run.errors import InputError, let_end
from megatron_run.errors.wording import advice, did_you_mean
from megatron_run.registry.choose import is_file
from megatron_run.registry.hooks import in_one_line
from megatron_run.registry.importing import FileNotRunError, import_file
from megatron_run_engine.optim.buckets import DEFAULT_CAPACITY

if TYPE_CHECKING:
    from types import ModuleType

    from megatron_run.contracts.schema import Config


#: The rules with a name; any other is MODULE:CLASS or FILE.py:CLASS.
RULES = ("adamw", "adam", "sgd", "muon")


def _rule(text: str) -> str:
    """One of :data:`RULES`, ``MODULE:CLASS`` or ``FILE.py:CLASS``."""
    module, _, name = text.rpartition(":")
    if text not in RULES and (not module or not name.isidentifier()):
        if is_file(text):
            raise ValueError(f"{text!r} names no class; write {text.rstrip(':')}:CLASS")
        listed = f"the rules are {', '.join(RULES)}, MODULE:CLASS, or ./FILE.py:CLASS"
        raise ValueError(f"{text!r} is not a rule; {advice(did_you_mean(text, RULES), listed)}")
    return text


def _multiplier(text: str) -> str:
    """``PATTERN:FACTOR``, where FACTOR is a number of at least 0."""
    pattern, _, factor = text.rpartition(":")
    try:
        valid = bool(pattern) and float(factor) >= 0
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"{text!r} is not PATTERN:FACTOR, as in embedding.*:0.1")
    return text


#: ``PATTERN:FACTOR``, as in ``embedding.*:0.1``.
Multiplier = Annotated[str, AfterValidator(_multiplier)]
#: Fraction of a moment that is kept at each step.
Decay = Annotated[float, Field(ge=0, lt=1)]


class UpdateOptions(BaseModel):
    """The update rule and its hyperparameters, the type of gradients, and the size of a bucket."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rule: Annotated[str, AfterValidator(_rule), FIXED, OF_FILES] = Field(
        "adamw", description="adamw, adam, sgd, muon, or MODULE:CLASS or ./FILE.py:CLASS of a torch optimizer"
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="decay of the moments, for adamw and adam")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment, for adamw and adam")
    momentum: float | None = Field(None, ge=0, lt=1, description="for sgd (unset: 0) and muon (unset: 0.95)")
    nesterov: bool = Field(False, description="Nesterov momentum, for sgd; muon has it without")
    rule_options: dict[str, Any] = Field(default_factory=dict, description="further arguments of the rule's class")
    adamw_for: tuple[str, ...] = Field(
        ("embedding.*", "output.*"), description="names, with * and ?, of matrices that muon leaves to adamw"
    )
    lr_mult: tuple[Multiplier, ...] = Field(
        (),
        description="PATTERN:FACTOR on the learning rate, by name; the last match counts",
    )
    grad_dtype: Literal["main", "param"] = Field(
        "main", description="type of gradient accumulation and reduction; main: fp32, param: the parameters'"
    )
    bucket_size: Annotated[int, NOT_LEARNED] = Field(
        DEFAULT_CAPACITY, ge=1, description="values that complete a gradient bucket"
    )
    overlap_grad_reduce: Annotated[bool, NOT_LEARNED] = Field(
        True, description="reduce complete buckets during the backward"
    )
    state_on_host: Annotated[bool, NOT_LEARNED] = Field(
        False, description="masters, main gradients and state in host memory, where the update runs"
    )

    def factor(self, name: str) -> float:
        """The learning rate's factor for the parameter ``name``."""
        for pattern, _, factor in (text.rpartition(":") for text in reversed(self.lr_mult)):
            if fnmatchcase(name, pattern):
                return float(factor)
        return 1.0

    def is_left_to_adamw(self, name: str) -> bool:
        """Whether rule muon leaves the matrix ``name`` to adamw."""
        return any(fnmatchcase(name, pattern) for pattern in self.adamw_for)


_MUON_MOMENTUM = 0.95  # the default of its authors and of PyTorch
#: Options that only some rules read, with these rules.
_READ_BY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "betas": ("adamw", "adam", "muon"),
        "eps": ("adamw", "adam", "muon"),
        "momentum": ("sgd", "muon"),
        "nesterov": ("sgd",),
        "adamw_for": ("muon",),
    }
)


@dataclass(frozen=True)
class UpdateRule:
    """A class of ``torch.optim`` with its arguments.

    ``whole``: the rule needs each logical tensor whole and in its shape. Otherwise it is elementwise, and applies to
    any range of a buffer. ``rest`` is the rule for tensors that this one cannot update (all but hidden matrices).
    ``starts_at_zero``: state of zeros before the first step is equivalent to no state. ``imported`` is how the user
    names a class that is none of :data:`RULES`, of which nothing else is known.
    """

    kind: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    whole: bool = False
    rest: UpdateRule | None = None
    starts_at_zero: bool = True
    imported: str = ""

    @property
    def documented(self) -> type[torch.optim.Optimizer]:
        """The class of PyTorch whose arguments a user may give."""
        return next(each for each in self.kind.__mro__ if each.__module__.startswith("torch.optim"))

    @property
    def name(self) -> str:
        """As a user knows it."""
        return self.imported or {"SplitMuon": "muon"}.get(self.kind.__name__, self.kind.__name__)

    def make(self, groups: list[dict[str, Any]], device: torch.device) -> torch.optim.Optimizer:
        """The optimizer of ``groups``, with PyTorch's fused kernel if the rule asks for it and ``device`` has one.

        Raises :class:`InputError` if the class rejects the arguments.
        """
        arguments = dict(self.arguments)
        if device.type == "meta":
            arguments.pop("fused", None)
        try:
            # Its metaclass is hashable, which torch hides from mypy by what it says of instances.
            kind = self.kind if self.imported else _without_compiler(self.kind)  # type: ignore[arg-type]
            made: torch.optim.Optimizer = kind(groups, **arguments)
        except (TypeError, ValueError) as error:
            given = ", ".join(f"{key}={value}" for key, value in arguments.items()) or "nothing but parameters"
            raise InputError(
                f"optimizer.rule: {self.name} cannot be made with {given}",
                why=str(error),
                fix="set optimizer.rule_options, or choose another rule",
            ) from error
        return made

    def divides(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer``, made for this rule, divides gradients by its ``grad_scale``.

        torch's own do where they are fused. What derives from them may read the gradients in a step of its own.
        """
        return not self.imported and all(group.get("fused") for group in optimizer.param_groups)


@cache
def _without_compiler(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """``kind``, with methods that do not tell torch's compiler to leave them alone.

    For that they would import it with the first optimizer and its first step, which takes more than a second.
    """
    methods = {"add_param_group": unwrap(kind.add_param_group), "step": torch.no_grad()(unwrap(kind.step))}
    return type(kind.__name__, (kind,), methods)


def check_update(config: Config, options: UpdateOptions) -> Iterator[str]:
    """For ``PluginInfo.check_config``: raise as :func:`find_rule` does, and report options without effect."""
    try:
        find_rule(options, config.parallel.tensor)
    except FileNotRunError:
        yield f"optimizer.rule={options.rule} is a file, and no file is run here: it is not checked"
    if options.state_on_host:
        _check_host(config, options)
    for option, rules in _READ_BY.items():
        # Not model_fields_set: the configuration that a run writes has every key.
        usual = type(options).model_fields[option].get_default(call_default_factory=True)
        if getattr(options, option) != usual and options.rule not in rules:
            yield f"optimizer.{option} does nothing with rule={options.rule}: it is for {', '.join(rules)}"
    given = options.rule_options
    for key in sorted({"lr", "weight_decay"} & given.keys()):
        yield f"optimizer.rule_options: {key} does nothing: every step sets it from train.{key}"
    for key in sorted(_READ_BY.keys() & given.keys()):
        if options.rule in _READ_BY[key]:
            replaced = f"optimizer.{key}={getattr(options, key)}"
            yield f"optimizer.rule_options: {key}={given[key]} takes the place of {replaced}"
    if options.rule == "muon" and not given.get("nesterov", True):
        yield "optimizer.rule_options: nesterov=false switches off what rule=muon has without being asked"
    if options.grad_dtype == "param" and config.train.precision == "fp32":
        yield "optimizer.grad_dtype=param changes nothing: with train.precision=fp32 both types are fp32"


def _check_host(config: Config, options: UpdateOptions) -> None:
    """Raise :class:`InputError` for a rule whose steps need the device."""
    if options.rule == "muon" and config.parallel.tensor > 1:
        why = f"parallel.tensor={config.parallel.tensor} cuts matrices, which ranks put together on the device"
        fix = "choose rule adamw, adam or sgd, or set optimizer.state_on_host=false"
    elif options.rule_options.get("capturable"):
        why, fix = "steps that are capturable run on a GPU alone", "leave capturable out of optimizer.rule_options"
    else:
        return
    raise InputError(f"optimizer.rule={options.rule} cannot update on the host", why=why, fix=fix)


def find_rule(options: UpdateOptions, tensor: int = 1) -> UpdateRule:
    """The rule that ``options`` select, for parameters split over ``tensor`` ranks.

    Raises :class:`InputError` for a rule that does not exist, or that cannot update parts of a matrix.
    """
    rule = _find(options)
    if not rule.imported:
        _check_arguments(rule, options)
    if rule.whole and tensor > 1 and options.rule != "muon":
        raise InputError(
            f"optimizer.rule={options.rule} updates whole matrices",
            why=f"parallel.tensor={tensor} cuts them",
            fix="set parallel.tensor=1, or choose adamw, adam, sgd or muon",
        )
    return rule


def _check_arguments(rule: UpdateRule, options: UpdateOptions) -> None:
    """Raise :class:`InputError` for an argument that the class of ``rule`` does not know."""
    known = [name for name in signature(rule.documented).parameters if name != "params"]
    for key in options.rule_options.keys() - set(known):
        raise InputError(
            f"optimizer.rule_options: rule={options.rule} has no {key!r}",
            fix=advice(did_you_mean(key, known), f"it has {', '.join(known)}"),
        )


def _find(options: UpdateOptions) -> UpdateRule:
    more = options.rule_options
    adamw = UpdateRule(torch.optim.AdamW, {"betas": options.betas, "eps": options.eps, "fused": True, **more})
    match options.rule:
        case "adamw":
            return adamw
        case "adam":
            return UpdateRule(torch.optim.Adam, adamw.arguments)
        case "sgd":
            momentum = options.momentum or 0.0
            arguments = {"momentum": momentum, "nesterov": options.nesterov, "fused": True, **more}
            # torch's first step sets the momentum buffer to the gradient, undampened: only without dampening does a
            # buffer of zeros give the same result.
            return UpdateRule(torch.optim.SGD, arguments, starts_at_zero=not more.get("dampening"))
        case "muon":
            return _muon(options)
        case name:
            return UpdateRule(_import(name), more, whole=True, starts_at_zero=False, imported=name)


def _muon(options: UpdateOptions) -> UpdateRule:
    """Muon for hidden matrices, AdamW for the rest."""
    if not hasattr(torch.optim, "Muon"):
        raise InputError(
            f"optimizer.rule=muon needs a newer torch than {torch.__version__}", fix="upgrade torch, or choose adamw"
        )
    momentum = _MUON_MOMENTUM if options.momentum is None else options.momentum
    rest = UpdateRule(torch.optim.AdamW, {"betas": options.betas, "eps": options.eps, "fused": True})
    from megatron_run_engine.optim.split_muon import SplitMuon  # torch below 2.9 lacks what it derives from

    return UpdateRule(SplitMuon, {"momentum": momentum, **options.rule_options}, whole=True, rest=rest)


def _import(name: str) -> type[torch.optim.Optimizer]:
    """The class that ``MODULE:CLASS`` or ``FILE.py:CLASS`` names. Raises :class:`InputError` if there is none."""
    place, _, attribute = name.rpartition(":")
    module = _module(name, place)
    kind = getattr(module, attribute, None)
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        return kind
    rules = sorted(
        key for key, each in vars(module).items() if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
    )
    what = "is not a torch.optim.Optimizer" if hasattr(module, attribute) else "does not exist"
    known = f"{place} has {', '.join(rules)}" if rules else f"{place} has no subclass of torch.optim.Optimizer"
    raise InputError(f"optimizer.rule={name} {what}", fix=did_you_mean(attribute, rules) or known)


def _module(name: str, place: str) -> ModuleType:
    """The module or file ``place``, imported for the rule ``name``."""
    try:
        if not is_file(place):
            return import_module(place)
        return import_file(Path(place).expanduser().resolve())
    except FileNotRunError:
        raise
    except FileNotFoundError as error:
        raise InputError(
            f"optimizer.rule={name}: there is no file {error.filename}", fix="write ./FILE.py:CLASS"
        ) from error
    except ModuleNotFoundError as error:
        why = f"there is no module {error.name!r}"
        fix = "install what holds it, or name a file: ./FILE.py:CLASS"
        raise InputError(f"optimizer.rule={name} cannot be imported", why=why, fix=fix) from error
    except BaseException as error:  # a module of the user's may raise anything, SystemExit included
        let_end(error)
        fix = "correct it, or see the whole cause with --debug"
        raise InputError(f"optimizer.rule={name} cannot be imported", why=in_one_line(error), fix=fix) from error

"""The logical tensors of a model from its options alone: what formats read is compared with them.

The model is ``gpt``, or an installed one whose options are gpt's with more.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from math import inf
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError

from megatron_run.contracts.schedule import Place
from megatron_run.contracts.schema import RunSection, TrainSection
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.errors import CheckpointError, InputError
from megatron_run.registry.choose import choose
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.runtime.comm import Groups
from megatron_run_engine.runtime.context import BuildContext, Dtypes
from megatron_run_engine.runtime.gradients import GradientAccumulator
from megatron_run_engine.runtime.metrics import Metrics
from megatron_run_engine.runtime.parameter_init import describe_parameters
from megatron_run_engine.runtime.rng import RandomStreams
from megatron_run_engine.runtime.segments import SegmentRunner

if TYPE_CHECKING:
    from megatron_run.contracts import Model
    from megatron_run.contracts.format import Weights
    from megatron_run.registry.loaded_plugin import Plugin

Shape = tuple[int, ...]
_GPT = "gpt"


def options_class(model: str) -> type[GptOptions]:
    """The options of ``model``, gpt's or of a class derived from them.

    Raises :class:`PluginError` where no such model is installed, :class:`InputError` for one with other options.
    """
    found = GptOptions if model == _GPT else _installed(model).options_model
    if not issubclass(found, GptOptions):
        raise InputError(f"the model is {model}", why=f"this format holds model={_GPT} and models made from it")
    return found


def _installed(model: str) -> Plugin:
    origin = f"model={model} of the weights"
    return load(choose(scan(), "model", model, origin), origin)


def gpt_options(weights: Weights, model: str = _GPT) -> GptOptions:
    """The options in ``weights.config``, which are of ``model``, with the size of the vocabulary.

    Raises :class:`InputError` for another model, and for options that it does not allow; as :func:`options_class`.
    """
    given = {"use": _GPT, **weights.config}
    if given.pop("use") != model:
        raise InputError(
            f"the model is {weights.config.get('use', _GPT)}", why=f"this format holds model={model} alone"
        )
    try:
        options = options_class(model).model_validate(given)
    except ValidationError as error:
        found = error.errors(include_url=False)
        reasons = [": ".join(filter(None, (".".join(map(str, each["loc"])), each["msg"]))) for each in found]
        raise InputError(f"model={model} cannot represent this model", why="; ".join(reasons)) from error
    if options.vocab_size is None:
        raise InputError("the size of the model's vocabulary is unknown")
    return options


def longest_sequence(options: GptOptions, sequence_length: int | None) -> int:
    """``sequence_length``, which must be known. Raises :class:`InputError` where it is not."""
    if sequence_length is None:
        raise InputError("the model's longest sequence is unknown", why=f"position={options.position} needs it")
    return sequence_length


def logical_shapes(
    options: GptOptions,
    sequence_length: int | None,
    most_layers: float = inf,
    most_experts: float = inf,
    model: str = _GPT,
) -> dict[str, Shape]:
    """Every logical tensor of ``model`` with its shape. ``sequence_length`` matters where positions are learned.

    The model itself says it: built with dense layers on the meta device, it takes no memory for values, but time for
    each layer. Raises :class:`CheckpointError` for more layers or experts than the files that are imported can hold.
    """
    layers, experts = options.num_layers, options.experts.count
    for count, most, what in ((layers, most_layers, "layers"), (experts, most_experts, "experts")):
        if count > most:
            raise CheckpointError(f"the model is said to have {count} {what}", why=f"its files hold at most {most:g}")
    longest = longest_sequence(options, sequence_length) if options.position == "learned" else 1
    context = _context(options, longest)
    layout = (Place(0, 0, range(options.num_layers)),)
    try:
        chunk = _make(model, context, options).build_chunk(0, layout, DenseLayers(context), {})
    except (TypeError, RuntimeError) as error:  # torch counts values in 63 bits
        raise CheckpointError("the model has sizes that no tensor can have", why=_first_line(error)) from error
    return {part.name: part.shape for info in describe_parameters(chunk).values() for part in info.parts}


def _make(model: str, context: BuildContext, options: GptOptions) -> Model:
    if model == _GPT:
        return Gpt(context, options)
    made: Model = _installed(model).with_options(options).create(context=context)
    return made


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _context(options: GptOptions, sequence_length: int) -> BuildContext:
    """The context of one rank without peers, in which nothing is trained."""
    meta = torch.device("meta")
    rng = RandomStreams(0, meta)
    return BuildContext(
        topology=Topology(Sizes(), 0),
        groups=Groups(),
        device=meta,
        dtypes=Dtypes(param=torch.float32, main=torch.float32),
        model=options,
        train=TrainSection(steps=1, global_batch_size=1, sequence_length=sequence_length),
        run=RunSection(),
        gradients=GradientAccumulator(),
        rng=rng,
        metrics=Metrics(meta),
        segments=SegmentRunner(rng),
        log=logging.getLogger("megatron_run"),
    )


def names_fault(found: Collection[str], expected: Collection[str]) -> str:
    """The names that are in only one of the two, a few of each; empty when both have the same."""
    lacking, foreign = (sorted(set(one) - set(other)) for one, other in ((expected, found), (found, expected)))
    parts = (("it lacks", lacking), ("it also has", foreign))
    return "; ".join(f"{verb} {first_few(names)}" for verb, names in parts if names)


def shapes_fault(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> str:
    """The names and shapes of ``found`` that differ from ``expected``; empty when none does."""
    both = [name for name in expected if name in found and found[name] != expected[name]]
    other = [f"{name} is {list(found[name])} there and {list(expected[name])} here" for name in both]
    return "; ".join(filter(None, (names_fault(found, expected), first_few(other))))


def first_few(words: list[str], most: int = 3) -> str:
    """``a, b, c and 12 more``; empty for none."""
    rest = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + rest

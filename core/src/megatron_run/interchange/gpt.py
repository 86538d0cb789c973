"""The logical tensors of model ``gpt``, from its options alone: what a whole model from elsewhere must have.

Legend: v vocabulary, h hidden, f feed-forward size, p positions, n heads, k key-value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from pydantic import ValidationError

from megatron_run.builtin.model.gpt import GptOptions
from megatron_run.errors import InputError

if TYPE_CHECKING:
    from megatron_run.interchange.weights import Weights

Shape = tuple[int, ...]


def gpt_options(weights: Weights) -> GptOptions:
    """The options in ``weights.config``, the vocabulary among them.

    Raises :class:`InputError` for another model, and for options that no ``gpt`` can have.
    """
    given = {"use": "gpt", **weights.config}
    if given.pop("use") != "gpt":
        raise InputError(f"the model is {weights.config['use']}", why="other formats know counterparts of gpt alone")
    try:
        options = GptOptions.model_validate(given)
    except ValidationError as error:
        reasons = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
        raise InputError("the model is none that gpt can be", why="; ".join(reasons)) from error
    if options.vocab_size is None:
        raise InputError("the size of the model's vocabulary is unknown")
    return options


def positions(options: GptOptions, sequence_length: int | None) -> int:
    """How long sequences are at most. Raises :class:`InputError` where nothing says it."""
    if sequence_length is None:
        raise InputError("the model's longest sequence is unknown", why=f"position={options.position} needs it")
    return sequence_length


def logical_shapes(options: GptOptions, sequence_length: int | None) -> dict[str, Shape]:
    """Every logical tensor of the model with its shape; ``sequence_length`` counts where positions are learned."""
    assert options.vocab_size is not None, "gpt_options saw to it"
    hidden, vocab = options.hidden_size, options.vocab_size
    found: dict[str, Shape] = {"embedding.word.weight": (vocab, hidden)}
    if options.position == "learned":
        found["embedding.position.weight"] = (positions(options, sequence_length), hidden)
    for layer in range(options.num_layers):
        found |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(options).items()}
    found |= _norm("final_norm", options)
    return found if options.tie_embeddings else {**found, "output.weight": (vocab, hidden)}


def _layer_shapes(options: GptOptions) -> dict[str, Shape]:
    hidden, ffn = options.hidden_size, options.ffn_size or 4 * options.hidden_size
    kv_width = hidden // options.num_heads * (options.num_kv_heads or options.num_heads)  # k * d
    widths = {"query": hidden, "key": kv_width, "value": kv_width}
    entrances = ("gate", "up") if options.activation == "swiglu" else ("up",)
    found = _norm("attention.qkv.norm", options)
    for name, width in widths.items():
        found |= _linear(f"attention.qkv.{name}", width, hidden, options)
    found |= _linear("attention.output", hidden, hidden, options)
    found |= _norm("mlp.input.norm", options)
    for name in entrances:
        found |= _linear(f"mlp.input.{name}", ffn, hidden, options)
    return found | _linear("mlp.output", hidden, ffn, options)


def _norm(name: str, options: GptOptions) -> dict[str, Shape]:
    parts = ("weight", "bias") if options.norm == "layernorm" else ("weight",)
    return {f"{name}.{part}": (options.hidden_size,) for part in parts}


def _linear(name: str, outputs: int, inputs: int, options: GptOptions) -> dict[str, Shape]:
    bias: dict[str, Shape] = {f"{name}.bias": (outputs,)} if options.bias else {}
    return {f"{name}.weight": (outputs, inputs), **bias}


def names_fault(found: Collection[str], expected: Collection[str]) -> str:
    """Which names are in one of the two only, a few of each; empty when they are the same."""
    lacking, foreign = (sorted(set(one) - set(other)) for one, other in ((expected, found), (found, expected)))
    parts = (("it lacks", lacking), ("it also has", foreign))
    return "; ".join(f"{verb} {some(names)}" for verb, names in parts if names)


def shapes_fault(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> str:
    """Which names and shapes of ``found`` are not those of ``expected``; empty when all are."""
    both = [name for name in expected if name in found and found[name] != expected[name]]
    other = [f"{name} is {list(found[name])} there and {list(expected[name])} here" for name in both]
    return "; ".join(filter(None, (names_fault(found, expected), some(other))))


def some(words: list[str], most: int = 3) -> str:
    """``a, b, c and 12 more``; empty for none."""
    rest = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + rest

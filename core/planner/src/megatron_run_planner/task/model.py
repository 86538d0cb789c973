"""The model of a configuration: its plugin is loaded, and tells its costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from megatron_run.config.fields import default_of, field_at
from megatron_run.config.merge import ConfigSource
from megatron_run.config.validate import validate
from megatron_run.contracts import ModelOptions
from megatron_run.contracts.costs import AttentionCosts, Divided, FeedForwardCosts, LayerCosts, ModelCosts
from megatron_run.contracts.model import MAX_LAYERS
from megatron_run.contracts.schema import TrainSection
from megatron_run.errors import Findings
from megatron_run.planning.plans import layers_of
from megatron_run.registry.known import known_plugin

if TYPE_CHECKING:
    from megatron_run.registry.loaded_plugin import Plugin

#: GPT-2's, where nothing says it.
VOCABULARY = 50257


class PlainDecoder(BaseModel):
    """The sizes of a model whose plugin is not installed here: those that models share by name."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    hidden_size: int = Field(ge=1)
    num_heads: int = Field(1, ge=1)
    ffn_size: int | None = Field(None, ge=1)
    vocab_size: int | None = Field(None, ge=1)
    tie_embeddings: bool = True

    def costs(self, sequence_length: int, vocab_size: int) -> ModelCosts:
        """Those of GPT-2's layers in these sizes."""
        hidden, ffn = self.hidden_size, self.ffn_size or 4 * self.hidden_size
        attention = AttentionCosts.plain(self.num_heads, hidden / self.num_heads)
        layer = LayerCosts(hidden, sequence_length, (attention, FeedForwardCosts(ffn)))
        heads = Divided(self.num_heads, "attention heads")
        features = Divided(ffn, "features of the feed-forward layer")
        return ModelCosts(
            (layer,) * self.num_layers,
            vocab_size,
            tied=self.tie_embeddings,
            positions=sequence_length,
            vectors=self.num_layers * (9 * hidden + ffn) + 2 * hidden,
            divided=(heads, features),
        )


def read_model(
    merged: ConfigSource, plugins: Mapping[str, tuple[Plugin, ...]], train: TrainSection, findings: Findings
) -> ModelCosts:
    """The costs of the model that ``merged`` chooses, one of ``plugins``, which say what is only approximate.

    Without its plugin it is a :class:`PlainDecoder`. Raises :class:`~megatron_run.errors.Problems` for wrong options.
    """
    (plugin,) = plugins["model"]
    approximations = list[str]()
    if plugin.loaded:
        layers_of(plugin)  # which are so many that a list of them can be made
        options = plugin.options
    else:
        approximations.append(f"a plain decoder because {plugin} is not installed here")
        values = {key[1:]: value for key, value in merged.values.items() if key[0] == "model"}
        known = {key: value for key, value in values.items() if key[0] in PlainDecoder.model_fields}
        options = validate(PlainDecoder, ("model",), known, findings, fix_missing=f"a plan of {plugin} needs it")
    findings.settle()
    assert isinstance(options, ModelOptions)  # by its contract, and as the plain decoder has it
    vocabulary = options.vocab_size or _vocabulary(merged, plugins.get("data", ()))
    if vocabulary is None:
        approximations.append(f"{VOCABULARY} words because neither model.vocab_size nor data.vocab_size says how many")
    found = options.costs(train.sequence_length, vocabulary or VOCABULARY)
    return replace(found, approximations=(*approximations, *found.approximations))


def _vocabulary(merged: ConfigSource, data: Sequence[Plugin]) -> int | None:
    """``data.vocab_size``, or what ``data`` has without it; None where that is for their files to say."""
    given = merged.values.get(("data", "vocab_size"))
    if given and str(given.data).isdecimal():
        return int(str(given.data))
    tokenizer = merged.values.get(("data", "tokenizer"))
    for plugin in data:
        if known := known_plugin("data", plugin.name):
            return known.vocab_size or None if tokenizer is None or tokenizer.data == "bytes" else None
        if field := field_at(plugin.options_model, ("vocab_size",)):
            found: int | None = default_of(field)
            return found
    return None

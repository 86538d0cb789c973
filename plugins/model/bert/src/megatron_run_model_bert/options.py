"""The options of model ``bert``; the defaults are BERT-base's, with the norms where Megatron-LM puts them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from megatron_run.config.fields import default_of
from megatron_run.config.values import flat
from megatron_run.contracts import NewParts
from megatron_run.contracts.meaning import OF_NEW_PART, OF_TRAINING
from megatron_run.contracts.option_groups import Group
from megatron_run.errors import InputError
from megatron_run_engine.nn import TransformerSpec, check_heads

if TYPE_CHECKING:
    from megatron_run.contracts.costs import ModelCosts

HeadKind = Literal["masked", "pretraining", "classification", "choice", "span"]

#: Heads that make logits over the vocabulary, by the word embedding.
OVER_WORDS = ("masked", "pretraining")


class NormOptions(Group):
    """The norms."""

    order: Literal["pre", "post"] = Field(
        "pre", description="pre: norms before attention and feed-forward; post: after each sum, as in the first BERT"
    )
    eps: float = Field(1e-12, gt=0, description="added to the variance")


class BertOptions(BaseModel):
    """The keys of section ``model`` when it uses bert."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    #: Fine-tuning brings a head of its own.
    new_parts: ClassVar[NewParts] = NewParts(
        ("head.pooler.", "head.order.", "head.classes.", "head.ends.", "head.dense.", "head.norm.", "head.bias."),
    )

    num_layers: int = Field(12, ge=1, description="transformer layers")
    hidden_size: int = Field(768, ge=1, description="width of the residual stream")
    num_heads: int = Field(12, ge=1, description="attention heads")
    ffn_size: int | None = Field(None, ge=1, description="width of the feed-forward layer; unset: 4 x hidden")
    vocab_size: int | None = Field(None, ge=1, description="unpadded token ids; unset: the data's")
    max_positions: Annotated[int | None, OF_NEW_PART] = Field(
        None, ge=1, description="learned positions; unset: the length of a row"
    )
    token_types: int = Field(2, ge=1, description="kinds of tokens, such as those of sentence A and of B")
    norm: NormOptions = Field(NormOptions(), description="norms")
    activation: Literal["gelu", "gelu_tanh"] = Field("gelu", description="of the feed-forward layer and of the head")
    dropout: Annotated[float, OF_TRAINING] = Field(
        0.1, ge=0, lt=1, description="on embedding, attention, residual connections and pooler"
    )
    init_std: Annotated[float, OF_TRAINING] = Field(
        0.02, gt=0, description="of initial matrices; times 1/sqrt(2 x layers) in residual outputs"
    )
    head: Annotated[HeadKind, OF_NEW_PART] = Field(
        "masked",
        description="masked: tokens; pretraining: and the order of sentences; classification, choice among rows of a "
        "sample, span: fine-tuning",
    )
    classes: Annotated[int, OF_NEW_PART] = Field(2, ge=2, description="classes of head=classification")
    choices: Annotated[int, OF_NEW_PART] = Field(
        1, ge=1, validate_default=True, description="rows of a sample, one a choice, of which head=choice finds one"
    )

    @field_validator("num_heads")
    @classmethod
    def _heads_divide_hidden(cls, heads: int, info: ValidationInfo) -> int:
        hidden = info.data.get("hidden_size")
        if hidden is not None:
            check_heads(hidden, heads)
        return heads

    @field_validator("choices")
    @classmethod
    def _chooses_among_several(cls, choices: int, info: ValidationInfo) -> int:
        head = info.data.get("head")
        if head is not None and (head == "choice") != (choices > 1):
            raise ValueError(f"head={head} with {choices}; a choice is among 2 or more, and other heads have 1")
        return choices

    @property
    def features(self) -> int:
        """Width of the feed-forward layer."""
        return self.ffn_size or 4 * self.hidden_size

    def explicit(self) -> dict[str, Any]:
        """The options by dotted name, with the values that unset ones mean, and the default of what no head reads."""
        found = flat(self.model_dump()) | {"ffn_size": self.features}
        if self.head != "classification":
            found["classes"] = default_of(type(self).model_fields["classes"])
        return found

    def costs(self, sequence_length: int, vocab_size: int) -> ModelCosts:
        """Those of a row, with the head's own matrices; of several choices a sample has so many rows."""
        row = sequence_length // self.choices
        if not row:
            raise InputError(
                f"model.choices={self.choices} is more than train.sequence_length={sequence_length}",
                why="each choice is a part of the sequence",
            )
        spec = self.spec(row, vocab_size)
        found = replace(spec, sequence_length=row).costs(tied=True)
        matrix, words = float(self.hidden_size**2), self.head in OVER_WORDS
        rows = f"rows of a {self.choices}th of the sequence, one a sample, because choices are not batched"
        return replace(
            found,
            positions=spec.sequence_length + self.token_types,
            head_weights=matrix if words else 0.0,
            other_weights=0.0 if self.head in ("masked", "span") else matrix,
            vectors=found.vectors + self._head_vectors(vocab_size),
            logits=words,
            approximations=(rows,) if self.choices > 1 else (),
        )

    def _head_vectors(self, vocab_size: int) -> int:
        """Values of the head's biases, of its norm, and of its products with few columns."""
        hidden = self.hidden_size
        masked, pooler = 3 * hidden + vocab_size, hidden
        columns = self.classes if self.head == "classification" else 1 if self.head == "choice" else 2
        last = columns * (hidden + 1)
        found: dict[HeadKind, int] = {"masked": masked, "pretraining": masked + pooler + last, "span": last}
        return found.get(self.head, pooler + last)

    def spec(self, row: int, vocab_size: int) -> TransformerSpec:
        """Return the network that these options describe, for rows of ``row`` tokens."""
        return TransformerSpec(
            layers=self.num_layers,
            hidden=self.hidden_size,
            heads=self.num_heads,
            kv_heads=self.num_heads,
            ffn=self.features,
            vocab=vocab_size,
            sequence_length=self.max_positions or row,
            norm_eps=self.norm.eps,
            activation=self.activation,
            dropout=self.dropout,
            init_std=self.init_std,
            causal=False,
            norm_placement="sum" if self.norm.order == "post" else "pre",
        )

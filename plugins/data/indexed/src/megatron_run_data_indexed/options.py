"""The keys of section ``data`` when it uses indexed."""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from megatron_run.contracts.option_groups import OF_FILES
from megatron_run_engine.data import AT_COMMAS, SplitShares


class IndexedOptions(BaseModel):
    """The keys of section ``data`` when it uses indexed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    paths: Annotated[tuple[str, ...], AT_COMMAS, OF_FILES] = Field(
        min_length=1, description="datasets, each the prefix of a .bin and .idx pair"
    )
    weights: Annotated[tuple[float, ...], AT_COMMAS] = Field(
        (), description="share of the samples that each of data.paths gives, in any unit; empty: as long as it is"
    )
    split: SplitShares = Field(
        (969, 30, 1), description="shares of train, validation and test, in any unit, by document"
    )
    order: Literal["permuted", "megatron"] = Field(
        "permuted", description="permuted: computed, without index files; megatron: that of megatron-core's GPTDataset"
    )
    samples: int | None = Field(
        None, ge=1, description="with order=megatron, the samples over which it shuffles; unset: those of the run"
    )
    cache: Annotated[str | None, OF_FILES] = Field(
        None, description="folder of order=megatron's index files; unset: megatron-run/indexed in the user's cache"
    )
    packing: Literal["stream", "documents"] = Field(
        "stream", description="stream: documents run into each other; documents: attention stays within each"
    )
    tokenizer: Annotated[str | None, OF_FILES] = Field(
        None, description="what made the tokens: bytes, or a JSON file of the `tokenizers` library"
    )
    vocab_size: int | None = Field(None, ge=2, description="token ids; unset: those of data.tokenizer")
    end_of_document: int | None = Field(
        None,
        ge=0,
        description="token that ends a document; unset: as prepared, else data.tokenizer's",
    )
    mask_end: bool = Field(
        False, description="leave the token after an end of document out of the loss (Megatron's --eod-mask-loss)"
    )
    reset_positions: bool = Field(
        False, description="count positions from 0 in each document (Megatron's --reset-position-ids)"
    )
    reset_attention: bool = Field(
        False, description="attend within documents alone (Megatron's --reset-attention-mask)"
    )

    @field_validator("weights")
    @classmethod
    def _one_a_dataset(cls, weights: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        paths = info.data.get("paths", ())
        if weights and len(weights) != len(paths):
            raise ValueError(f"data.weights has {len(weights)} numbers for {len(paths)} of data.paths")
        if not all(isfinite(weight) and weight > 0 for weight in weights):
            raise ValueError("data.weights are above 0")
        return weights

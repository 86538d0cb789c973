"""Notes of an import about a source that is whole, and of which something will not do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megatron_run.contracts.format import Weights
from megatron_run.errors import RunError
from megatron_run_engine.data.tokenizer import open_tokenizer


def not_finite(bad: Counter[str]) -> Iterator[str]:
    """A note about values that are NaN or infinite, counted by tensor: a source that diverged or was damaged."""
    if bad:
        yield f"{sum(bad.values())} values are NaN or infinite, the first of them in {next(iter(bad))}"


def too_many_ids(weights: Weights) -> Iterator[str]:
    """A note where the tokenizer has ids without a row of the embedding: with it, the model cannot be used."""
    rows = weights.config.get("vocab_size")
    if weights.tokenizer is None or not isinstance(rows, int):
        return
    try:
        ids = open_tokenizer(str(weights.tokenizer)).rows
    except RunError:  # it is told when it is used
        return
    if ids > rows:
        yield (
            f"its tokenizer has {ids} ids and the model {rows} rows for them: "
            "use it with another one, --plugin data=text,tokenizer=FILE, or with ids, --tokens --plugin data=mock"
        )

"""Keys whose value may name a tokenizer of another place, as ``hf:ORG/NAME``: a run has its folder on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron_run.config.merge import ConfigSource
from megatron_run.errors import Findings, RunError
from megatron_run.planning.decided import begun_with
from megatron_run.registry.fetching import fetch

_TOKENIZER = ("data", "tokenizer")


def fetch_tokenizer(merged: ConfigSource, findings: Findings, tell: Callable[[str], None]) -> ConfigSource:
    """``merged`` with the folder of the tokenizer that ``data.tokenizer`` names, whose path has the revision.

    A run that goes on has the revision with which it began. What was found in a folder of somebody else's is left as it
    is: it fetches nothing.
    """
    value = merged.values.get(_TOKENIZER)
    if value is None or value.origin.source == "found" or not isinstance(value.data, str):
        return merged
    before = (begun_with(merged) or {}).get("data.tokenizer")
    with findings.collect():
        try:
            found = fetch(str(value.data), "tokenizer", tell, Path(before) if isinstance(before, str) else None)
        except RunError as error:
            error.origin = error.origin or str(value.origin)
            raise
        if found is not None:
            tell(f"data.tokenizer is {found.name}")
            return replace(merged, values={**merged.values, _TOKENIZER: replace(value, data=str(found.folder))})
    return merged

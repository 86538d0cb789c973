"""What a run imports and reads before it trains: whoever imports this has done so, as the server that forks ranks."""

from __future__ import annotations

from megatron_run.config.request import Request
from megatron_run.planning import resolve
from megatron_run_engine.builtin.model import decoder  # noqa: F401  # imported when a model is made
from tests.support.installed import read_once

with read_once():
    resolve(Request(("preset:tiny",)))

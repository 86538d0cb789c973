"""Planning: from the user's request to a checked run, before any process group exists. Imports no torch."""

from megatron_run.planning.describe import describe
from megatron_run.planning.resolver import load_config, resolve
from megatron_run.planning.run import ResolvedRun, to_yaml

__all__ = ["ResolvedRun", "describe", "load_config", "resolve", "to_yaml"]

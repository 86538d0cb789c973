"""From what a user typed to a checked run, before any process group exists."""

from megatron_run.planning.resolver import load_config, resolve
from megatron_run.planning.run import ResolvedRun

__all__ = ["ResolvedRun", "load_config", "resolve"]

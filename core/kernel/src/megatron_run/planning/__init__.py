"""Plans a run, before any process group exists: from what a user typed to a checked :class:`ResolvedRun`.

Imports: config, contracts, errors, pipeline, registry.
"""

from megatron_run.planning.resolver import load_config, resolve
from megatron_run.planning.run import ResolvedRun

__all__ = ["ResolvedRun", "load_config", "resolve"]

"""Plans a run, before any process group exists: from what a user typed to a checked :class:`ResolvedRun`.

Imports: config, contracts, errors, files, pipeline, registry.
"""

from megatron_run.planning.describe import describe
from megatron_run.planning.resolver import check_keys, load_config, resolve
from megatron_run.planning.run import ResolvedRun, to_yaml

__all__ = ["ResolvedRun", "check_keys", "describe", "load_config", "resolve", "to_yaml"]

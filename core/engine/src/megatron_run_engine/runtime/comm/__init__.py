"""Process groups by axis, and the collectives of the ranks in them.

A single rank has no group: its collectives are no-ops.
"""

from megatron_run_engine.runtime.comm.groups import Channels, Groups, Scope, create_aside, create_groups, patience
from megatron_run_engine.runtime.comm.parallel_group import ALONE, ParallelGroup, Pending

__all__ = [
    "ALONE",
    "Channels",
    "Groups",
    "ParallelGroup",
    "Pending",
    "Scope",
    "create_aside",
    "create_groups",
    "patience",
]

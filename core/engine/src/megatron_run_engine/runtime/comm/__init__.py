"""Process groups by axis, and what ranks do together in them.

A group of one rank is no group: its collectives do nothing.
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

"""Schedules that are installed, and schedules found by search for given times and bytes of every layer.

:mod:`~megatron_run_planner.schedules.installed` makes the plans of the first. Of the search,
:mod:`~megatron_run_planner.schedules.workload_costs` says what it is given and what no answer can beat,
:mod:`~megatron_run_planner.schedules.greedy` makes lists by rules, :mod:`~megatron_run_planner.schedules.polish`
improves them along the critical path, :mod:`~megatron_run_planner.schedules.places` deals the layers out and joins the
three, :mod:`~megatron_run_planner.schedules.for_task` asks it for a configuration, and
:mod:`~megatron_run_planner.schedules.plugin_file` writes the answer as a schedule plugin.
"""

from megatron_run_planner.schedules.installed import LARGEST, Schedules, named, spread

__all__ = ["LARGEST", "Schedules", "named", "spread"]

"""The planner: time and memory of a step before it runs, and what to choose. It needs neither torch nor numpy.

Reading order: :mod:`~megatron_run_planner.workload` says what is trained and how it is split,
:mod:`~megatron_run_planner.devices` what a machine can do, :mod:`~megatron_run_planner.layer_time` the products and
sweeps of a layer and how long they take there, :mod:`~megatron_run_planner.split_samples` what ranks that split samples
send each other, and :mod:`~megatron_run_planner.step_time` simulates a step's verified action lists with these times.
:mod:`~megatron_run_planner.memory` counts bytes, :mod:`~megatron_run_planner.search` tries every split of a
:mod:`~megatron_run_planner.task`, :mod:`~megatron_run_planner.accuracy` compares predictions with measured tables,
:mod:`~megatron_run_planner.schedules` has the installed schedules and finds others, and
:mod:`~megatron_run_planner.goodput` says what a month of failures leaves.
"""

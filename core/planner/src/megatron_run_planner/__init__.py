"""The planner: how long a step takes, before it runs. It needs neither torch nor numpy.

Reading order: :mod:`~megatron_run_planner.workload` says what is trained and how it is split,
:mod:`~megatron_run_planner.operators` the products and sweeps of a layer, :mod:`~megatron_run_planner.hardware` what a
machine can do, :mod:`~megatron_run_planner.layer_time` how long a layer takes there, and
:mod:`~megatron_run_planner.step_time` simulates a step's verified action lists with these times.
:mod:`~megatron_run_planner.accuracy` compares predictions with measured tables.
"""

"""Sweeps: one configuration trained with several values of some keys, and how the runs compare.

:mod:`~megatron_run_sweep.axes` reads what is swept, :mod:`~megatron_run_sweep.record` keeps it in the sweep's folder,
:mod:`~megatron_run_sweep.outcomes` reads how far each run is, :mod:`~megatron_run_sweep.picture` draws them, and
:mod:`~megatron_run_sweep.sampler` draws values by Optuna. Each run is a process of the command, which
:mod:`~megatron_run_sweep.child` becomes. No part needs torch.
"""

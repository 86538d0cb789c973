"""Estimates before a run: the sizes of its model and the memory of its steps, and the measured times of this machine.

``model_size`` builds every rank's model on the meta device, ``step_memory`` follows a step through the schedule;
``room_for_copies`` counts what steps in memory take; ``calibration`` measures what the planner predicts with.

Imports: checkpoint, config, contracts, errors, host, nn, optim, pipeline, planning, run_folder, runtime, training.
"""

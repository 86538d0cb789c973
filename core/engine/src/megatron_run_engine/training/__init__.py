"""The training loop: builds a rank, runs steps, evaluates and saves.

``trainer`` holds one step from top to bottom. ``state`` resumes and saves checkpoints, ``health`` checks losses,
weights and ranks; ``calibration`` measures the machine; ``environments`` finds the world that a process was started in,
``process`` prepares it.

Imports: capture, checkpoint, config, contracts, data, errors, files, nn, pipeline, planning, registry, run_folder,
runtime.
"""

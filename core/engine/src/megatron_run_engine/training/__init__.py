"""The training loop: builds a rank, runs steps, evaluates and saves.

``trainer`` holds one step from top to bottom. ``state`` resumes and saves checkpoints, ``health`` checks losses,
weights and ranks.

Imports: capture, checkpoint, config, contracts, data, errors, evaluation, files, host, pipeline, planning,
registry, run_folder, runtime.
"""

"""The trainer: builds a rank, steps, evaluates, saves. ``state`` says what it starts from, ``health`` watches it.

Imports: capture, checkpoint, config, contracts, data, errors, pipeline, planning, registry, run_folder, runtime.
"""

"""Evaluation of a model: its loss on samples of a split, and the tasks that score texts.

``sample_losses`` is the one path from samples to a loss; ``tasks`` are those of ``eval.tasks``.

Imports: contracts, data, errors, runtime.
"""

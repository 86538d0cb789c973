"""Evaluation of a model: its loss on samples of a split, and the tasks that score texts.

``sample_losses`` is the one path from samples to a loss; ``tasks`` are those of ``eval.tasks``; ``evaluator`` is what a
training does of it, and the text that it writes in the end.

Imports: contracts, data, errors, planning, runtime.
"""

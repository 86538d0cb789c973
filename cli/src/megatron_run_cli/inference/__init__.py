"""The commands that put a trained model to use: ``generate`` and ``eval``.

Imports: config, errors; when a command runs, the engine.
"""

"""The megatron-run command: a module per command, ``reports`` for what they print, ``scaffold`` for new plugins.

It imports the kernel; the engine only inside the functions that need it.
"""

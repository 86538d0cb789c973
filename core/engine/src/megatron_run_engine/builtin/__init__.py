"""The built-in plugins that need torch, one folder per kind, registered through the same hooks as third parties'.

Imports: checkpoint, config, contracts, data, errors, files, hookspecs, host, lazy, nn, optim, runtime.
"""

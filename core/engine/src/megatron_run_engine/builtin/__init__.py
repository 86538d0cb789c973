"""The built-in plugins that need torch, registered through the hooks that every plugin uses: one folder a kind.

Imports: checkpoint, contracts, data, errors, hookspecs, nn, optim, runtime.
"""

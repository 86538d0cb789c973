"""The built-in plugins that need no torch.

Imports: contracts, errors, hookspecs.
"""

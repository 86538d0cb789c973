"""Completion in bash, zsh and fish by click's own mechanism: scripts of the shells, and what may be typed where.

Nothing heavy is imported and no plugin: what their options are was learned when the script was printed.
"""

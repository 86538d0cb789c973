"""Files: those of others, those that a command makes for its user, and a folder that somebody may have prepared.

Imports: nothing.
"""

"""Configuration: reads its sources, merges them, validates the sections; every value keeps its origin.

Imports: contracts, errors, files.
"""

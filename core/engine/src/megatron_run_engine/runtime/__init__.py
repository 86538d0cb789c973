"""The runtime of one rank: executor, messages between stages, gradients, collectives, random streams, metrics.

Imports: contracts, errors, pipeline.
"""

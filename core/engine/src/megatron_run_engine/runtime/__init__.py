"""What one rank runs on: the executor, its messages, gradients, collectives, random streams and metrics.

Imports: contracts, errors, pipeline.
"""

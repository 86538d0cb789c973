"""The ground of one rank: the executor, its messages, gradients, collectives, random streams, metrics.

``generation`` adds tokens to texts, one forward a token.

Imports: contracts, errors, pipeline.
"""

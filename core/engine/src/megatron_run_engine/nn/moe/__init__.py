"""Mixtures of experts: a router sends each token to a few of many feed-forward networks.

Reading order: ``router`` (the choice of experts and the auxiliary losses), ``placement`` (sorting tokens by expert, and
the weighted sum of the results), ``dispatch`` (tokens between ranks), ``layer`` (all of it).
"""

"""Mixtures of experts: a router sends each token to a few of many feed-forward networks.

Reading order: ``nn/spec.py`` (the options), ``router`` (choice of experts, auxiliary losses), ``placement`` (sorting
tokens by expert), ``dispatch`` (communication between ranks), ``Experts`` in ``nn/mlp.py``, ``layer`` (all of it).
"""

"""Mixtures of experts: a router sends each token to a few of many feed-forward networks.

Reading order: ``moe_spec`` (the choices), ``router`` (who meets whom, and the losses), ``placement`` (maps), ``rows``
(copies and their way back), ``dispatch`` (between ranks), ``expert_mlp``, ``layer`` (all of it), ``report``.
"""

"""The trials of the suite of kind ``parallel-layer``, on one rank and on several that share the layers.

Reading order: ``place`` (the part of a tensor that a rank holds), ``cases`` (every layer with its inputs), ``trial`` (a
layer against its oracle), ``promises`` (other properties of a factory).
"""

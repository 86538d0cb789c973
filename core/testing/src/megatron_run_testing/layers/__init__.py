"""What the suite of kind ``parallel-layer`` tries on a factory, on one rank or on several that share its layers.

Reading order: ``place`` (which part of a tensor a rank holds), ``cases`` (every layer with its inputs), ``trial`` (a
layer against its oracle), ``promises`` (what else a factory promises).
"""

"""From documents to batches: tokenizers, packing, the order of samples, batches of fields.

Imports: contracts, errors.
"""

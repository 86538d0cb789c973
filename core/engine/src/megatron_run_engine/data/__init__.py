"""The data pipeline from documents to batches: tokenizers, packing, sample order, fields on the device.

Imports: contracts, errors, files.
"""

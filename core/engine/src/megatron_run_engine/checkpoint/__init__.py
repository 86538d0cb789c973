"""Checkpoints: folders of safetensors shards and a manifest; a committed step is never lost or overwritten.

Imports: contracts, errors, runtime.
"""

"""Checkpoints: folders of safetensors shards and a manifest; what was committed is never lost or overwritten."""

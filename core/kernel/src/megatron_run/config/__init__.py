"""Configuration: reading it, layering it, checking it. Typed and frozen; nothing here imports torch."""

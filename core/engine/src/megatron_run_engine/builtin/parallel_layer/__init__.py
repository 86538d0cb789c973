"""Built-in plugins of kind parallel-layer."""

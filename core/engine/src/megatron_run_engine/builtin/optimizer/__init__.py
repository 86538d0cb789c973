"""Built-in plugins of kind optimizer."""

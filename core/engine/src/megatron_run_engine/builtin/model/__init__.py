"""Built-in plugins of kind model."""

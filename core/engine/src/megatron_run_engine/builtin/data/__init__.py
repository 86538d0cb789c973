"""Built-in plugins of kind data."""

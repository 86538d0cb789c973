"""Built-in plugins of kind observer."""

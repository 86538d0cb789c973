"""Built-in plugins of kind schedule."""

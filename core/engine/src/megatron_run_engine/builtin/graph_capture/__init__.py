"""Built-in plugins of kind graph-capture."""

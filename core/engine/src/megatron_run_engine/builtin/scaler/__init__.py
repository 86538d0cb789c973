"""Built-in plugins of kind scaler."""

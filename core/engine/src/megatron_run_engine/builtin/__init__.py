"""The plugins that come with the kernel, registered through the same hooks as everybody's: one folder a kind."""

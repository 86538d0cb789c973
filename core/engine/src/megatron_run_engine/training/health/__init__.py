"""Checks of a running training: losses and gradients, replicas, slow ranks; and faults injected for tests."""

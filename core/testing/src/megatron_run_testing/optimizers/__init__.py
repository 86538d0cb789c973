"""What the conformance suite of kind ``optimizer`` is made of: a bench, and what is tried on it."""

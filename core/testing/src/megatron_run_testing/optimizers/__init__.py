"""The trials of the suite of kind ``optimizer``, and the bench on which they run."""

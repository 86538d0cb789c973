"""From samples to batches: the order of samples, batches of fields, and the parts of the text pipeline."""

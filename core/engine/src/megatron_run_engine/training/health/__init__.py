"""What watches a training from inside: losses and gradients, replicas, slow ranks, and faults on request."""

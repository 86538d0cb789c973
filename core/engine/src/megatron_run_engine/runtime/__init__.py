"""One rank at work: executor, messages, gradients, collectives, random streams, metrics. Imports the kernel only."""

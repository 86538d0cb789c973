"""What a training starts from: resuming its own checkpoints, another run's weights, and saves on the way."""

"""What the trainer works with: building a rank, feeding, evaluating, generating, reporting."""

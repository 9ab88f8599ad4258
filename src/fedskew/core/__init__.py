"""What a method is written in: tensors, sites, training, losses, seeds, settings."""

"""The training loop: the step, checkpoints, the update guard, metrics and warnings."""

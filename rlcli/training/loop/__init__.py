"""The training loop: the step, batch selection, checkpoints, the update guard, metrics and warnings."""

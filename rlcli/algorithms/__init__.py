"""Pure torch: advantages, losses, KL estimates, aggregation, corrections and selection."""

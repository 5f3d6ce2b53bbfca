"""Training: the loop on the controller, the workers that it calls, and listeners that follow a run."""

"""What fits a run's devices: sizes, changes with which it fits, and layouts."""

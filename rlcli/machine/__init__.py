"""The machine: its GPUs."""

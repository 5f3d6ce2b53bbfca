"""The machine: its GPUs, its processor, and how it computes."""

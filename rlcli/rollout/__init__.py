"""Generation: engines, the scheduler that asks them for a step's samples, and the worker's part in it."""

"""The Python API for programs and notebooks: `train` and `eval` as functions, and a run's records."""

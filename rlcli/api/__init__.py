"""What a Python program or a notebook calls: the commands `train` and `eval` as functions, and a run's records."""

"""The rates of the machine that the command runs on: a short measurement, and its cache."""

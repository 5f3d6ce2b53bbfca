"""Whether asynchrony gains: a simulation of a run's steps from the lengths of its responses and its speeds."""

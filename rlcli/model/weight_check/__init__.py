"""Checks that an engine holds the weights that the trainer sent, and that weights are finite."""

"""Texts of steps and of samples, for people who look at a run in a terminal."""

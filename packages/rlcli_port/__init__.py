"""Adapters for other frameworks: configurations of verl and TRL, their reward functions and environments."""

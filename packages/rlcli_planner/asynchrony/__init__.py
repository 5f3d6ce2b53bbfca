"""Simulate a run's steps from its response lengths and speeds, to find whether asynchrony gains."""

"""Reward functions written for other frameworks, called as verifiers."""

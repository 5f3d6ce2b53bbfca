"""Signals of reward hacking: what should move with the reward and does not, and what should not move and does."""

"""Checks of each step that stop the run: what the workers did against the plan, and the engine against the trainer."""

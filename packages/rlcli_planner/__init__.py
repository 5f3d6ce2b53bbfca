"""Predict a run before it starts: memory and time by phase, disk, and the largest sizes that fit.

Arithmetic only: the model's shape comes from its config.json and the GPU from a table; weights and devices are not
touched. docs/planning.md explains the basis of each figure.
"""

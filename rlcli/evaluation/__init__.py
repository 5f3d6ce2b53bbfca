"""Evaluations: the folder of their samples, statistics, intervals and comparisons."""

"""Statistics of evaluations: pass@k, intervals and comparisons."""

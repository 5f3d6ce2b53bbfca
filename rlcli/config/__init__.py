"""The schema of a run, its rules, recipes, and how values are resolved."""

"""Sizes, changes and layouts with which a run fits its devices."""

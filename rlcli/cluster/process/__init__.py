"""Measurements of a process by itself: its memory, its heap, a profile of its methods, its start time."""

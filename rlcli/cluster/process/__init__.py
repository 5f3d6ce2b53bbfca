"""What a process measures about itself: its memory, its heap, a profile of its methods, its start time."""

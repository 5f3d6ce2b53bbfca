"""One scoring service per machine, shared by all its engines."""

"""Import verl and TRL configurations as recipes. Files are read as data and never executed."""

"""Import verl and TRL configurations as recipes. Scripts run in the sandbox alone; tables are read as data."""

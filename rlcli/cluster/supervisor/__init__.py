"""The parent process of a run: automatic restarts, signals and exit codes."""

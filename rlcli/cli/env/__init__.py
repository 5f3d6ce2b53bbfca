"""`rlcli env` and its subcommands."""

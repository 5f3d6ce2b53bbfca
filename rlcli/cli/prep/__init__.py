"""`rlcli prep` and its subcommands."""

"""`rlcli verifiers` and its subcommands."""

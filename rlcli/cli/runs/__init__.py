"""`rlcli runs` and `rlcli export`."""

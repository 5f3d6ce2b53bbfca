"""`rlcli recipes` and `rlcli config`."""

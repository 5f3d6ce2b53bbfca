"""`rlcli eval` and `rlcli eval compare`."""

"""`rlcli train`, `rlcli plan` and `rlcli quickstart`."""

"""The task and warm start of `rlcli quickstart`."""

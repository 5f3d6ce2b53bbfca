"""`rlcli quickstart` with its tasks and warm start, and the small models of `tiny-model` and `real-model`."""

"""`rlcli plan` and `--memory auto`: a run as the planner predicts it, and the constants of those predictions."""

"""Runs `rlcli eval`: settings, the folder of finished samples, local engines or an endpoint, the report."""

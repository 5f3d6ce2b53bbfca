"""Environments of other projects behind rlcli's protocol, each a file that runs without rlcli, in their interpreter."""

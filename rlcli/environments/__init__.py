"""Conversations: what follows a turn of the policy, in tokens."""

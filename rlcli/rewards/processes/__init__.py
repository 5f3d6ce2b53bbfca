"""Scoring processes: a pool of workers that can be killed, and the fork server that starts them."""

"""Reinforcement learning with verifiable rewards for reasoning models, from one command line."""

__version__ = "0.1.0"

"""Mixtures of experts: their load, routes of the engine, and adapters on them."""

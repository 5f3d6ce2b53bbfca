"""Models on disk: reading configurations, loading and saving weights, making tiny models."""

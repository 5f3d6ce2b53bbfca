"""Run folders, checkpoints and step records on disk."""

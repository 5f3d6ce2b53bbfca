"""Run folders on disk: checkpoints, records, and the trackers that metrics go to."""

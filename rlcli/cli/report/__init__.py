"""Commands that show what a run did."""

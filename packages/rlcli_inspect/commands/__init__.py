"""The commands `report`, `view`, `runs compare` and `runs signals`."""

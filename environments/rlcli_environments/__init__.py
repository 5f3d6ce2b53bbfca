"""The built-in environments: one short file each."""

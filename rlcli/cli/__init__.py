"""The commands, one file each, with a folder for each group of commands."""

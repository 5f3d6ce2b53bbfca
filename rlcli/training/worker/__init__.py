"""The actor that hosts the models of one device: its roles, its training backend and its weight sync."""

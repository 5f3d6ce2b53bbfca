"""The actor that hosts the models of one device, and its specification."""

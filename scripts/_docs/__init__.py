"""Makes the documentation site: stages pages, generates the reference, checks the built site. For `scripts/docs`."""

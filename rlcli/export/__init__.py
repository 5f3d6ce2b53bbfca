"""Export checkpoints as Hugging Face folders, verified before they are put in place."""

"""Images of prompts: their form in rows, safe decoding, and the preprocessing of models."""

"""Pictures of prompts: how rows hold them, decoding them safely, and what a model sees of them."""

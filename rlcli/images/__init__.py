"""Pictures of prompts: how rows hold them, and decoding them safely."""

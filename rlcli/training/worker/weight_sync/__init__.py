"""How the trained weights reach the engines: written in place, broadcast, or through Ray's object store."""

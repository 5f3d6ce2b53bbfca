"""Transfer of the trained weights to the engines: written in place, broadcast, or through Ray's object store."""

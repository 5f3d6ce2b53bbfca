"""The engine `server`: generates on inference servers, which it feeds, watches and replaces."""

"""Shows what a run did: reads its folder, and serves or writes pages of it."""

"""Shows what a run did: pages, comparisons, and signals of reward hacking."""

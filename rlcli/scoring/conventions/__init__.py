"""Functions written for other frameworks, called as verifiers."""

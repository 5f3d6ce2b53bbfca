"""Audit a verifier: write every row's right answer in many ways, and compare its verdicts with the expected ones."""

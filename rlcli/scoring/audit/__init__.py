"""Does a verifier say what it should? Every row's right answer, told in many ways, against what it says."""

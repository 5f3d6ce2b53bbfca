"""Secrets, taken out of what is recorded or printed: tokens and keys of the environment, and passwords of URLs."""

from __future__ import annotations

import os
import re

SECRET_NAME = re.compile(r"(?:^|_)(?:API_?)?(?:KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)(?:_|$)", re.IGNORECASE)
"""Names of environment variables that hold secrets."""

LEAST = 8
"""Characters of a secret; what is shorter may be part of any word."""


def redacted(text: str) -> str:
    """`text` with *** in the place of secrets.

    >>> redacted("POST https://me:hunter2@tracker.example/api failed")
    'POST https://***@tracker.example/api failed'
    """
    for name, value in os.environ.items():
        if len(value) >= LEAST and SECRET_NAME.search(name):
            text = text.replace(value, "***")
    return re.sub(r"""//[^/@\s"']*@""", "//***@", text)

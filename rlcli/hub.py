"""Whether the Hugging Face hub is there, found out before its clients would retry for a minute."""

from __future__ import annotations

import os
from collections.abc import Callable

ENDPOINT = "https://huggingface.co"
TIMEOUT_S = 5.0


def offline_unless_reachable(on_note: Callable[[str], None]) -> None:
    """Where the hub does not answer, set HF_HUB_OFFLINE for this process and its workers: its clients then take what
    is cached, and say at once what is not.

    To be called before `huggingface_hub` is imported, which reads the variable then.
    """
    if os.environ.get("HF_HUB_OFFLINE"):
        return
    import httpx

    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or ENDPOINT
    try:
        httpx.head(endpoint, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        on_note(f"{endpoint} cannot be reached ({str(error) or type(error).__name__}): using what is cached")

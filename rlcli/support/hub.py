"""The Hugging Face hub: checks that it is reachable before its clients would retry for a minute; uploads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rlcli.errors import RlcliError, RunFailed

ENDPOINT = "https://huggingface.co"
TIMEOUT_S = 5.0


def offline_unless_reachable(on_note: Callable[[str], None]) -> None:
    """If the hub does not answer, set HF_HUB_OFFLINE for this process and its workers: its clients then use the cache,
    and fail at once for what is not cached.

    Call it before the import of `huggingface_hub`, which reads the variable.
    """
    if os.environ.get("HF_HUB_OFFLINE"):
        return
    import httpx

    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or ENDPOINT
    try:
        httpx.head(endpoint, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        on_note(f"{endpoint} cannot be reached ({str(error) or type(error).__name__}): using the cache only")


def check_push(repo: str) -> None:
    """Raise `RlcliError` if nothing can be uploaded to `repo`, because of its name, the network or the login."""
    from httpx import HTTPError
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    from huggingface_hub.utils._validators import validate_repo_id

    login = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise RlcliError(f"--push {repo}: {error}".splitlines()[0].rstrip("."), "write OWNER/NAME") from error
    if not get_token():
        raise RlcliError(f"--push {repo}: no Hugging Face token found", login)
    try:
        HfApi().whoami()
    except OfflineModeIsEnabled as error:
        raise RlcliError(f"--push {repo}: HF_HUB_OFFLINE is set", "unset it") from error
    except (HfHubHTTPError, HTTPError) as error:
        raise RlcliError(f"--push {repo}: the hub refuses: {_first_line(error)}", login) from error


def push_folder(folder: Path, repo: str) -> str:
    """Upload `folder` to the model repository `repo`, private if it is new, as one commit. Returns its address.

    `RunFailed` has the remaining steps.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        url = api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Export from rlcli")
    except (HfHubHTTPError, HTTPError, OSError, RuntimeError) as error:
        raise RunFailed(
            f"{folder} is exported, but not pushed to {repo}: {_first_line(error)}",
            f"fix that, then: hf upload --private {repo} {folder}",
        ) from error
    return str(url)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

"""The environment variables that environments and agents inherit from this process: no secret that was not named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlcli.errors import SetupError
from rlcli.support.importing import without_safe_path
from rlcli.support.machine.gpus import HIDDEN
from rlcli.support.redact import has_login, without_secrets

KEY = "environment.variables"
"""The configuration key that names further ones."""

LOOPBACK = "127.0.0.1,localhost"

FOR_AGENTS = frozenset(
    [
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP"),
        *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
        # An interpreter's own folder and packages, and threads.
        *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"),
        *HIDDEN,  # the GPUs that it sees
        # Certificates and proxies.
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
        "RLCLI_SANDBOX",
    ]
)
"""Variables that programs need to start and to reach the network. A secret or a value with a login is left out."""
PREFIXES_FOR_AGENTS = ("LC_", "PYTHON", "PIP_", "UV_")


def for_agent(environment: Mapping[str, str], extra_names: Sequence[str], session: Mapping[str, str]) -> dict[str, str]:
    """The variables of an agent's program: those of `environment` that every program needs, those `extra_names`, and
    those of its `session`, whose server is on loopback. Raises `SetupError` if one that is named is not set.

    >>> found = for_agent({"LC_ALL": "C", "AWS_PROFILE": "me", "A": "1"}, ["A"], {"RLCLI_SESSION": "x"})
    >>> [name for name in found if name.lower() != "no_proxy"]
    ['LC_ALL', 'A', 'RLCLI_SESSION']
    """
    inherited = {
        name: value
        for name, value in without_safe_path(environment).items()
        if name in FOR_AGENTS or name.startswith(PREFIXES_FOR_AGENTS)
        if not has_login(value)
    }
    variables = without_secrets(inherited) | _named(environment, extra_names)
    direct = ",".join(filter(None, [variables.get("NO_PROXY") or variables.get("no_proxy", ""), LOOPBACK]))
    return {**variables, **session, "NO_PROXY": direct, "no_proxy": direct}


def for_environment(environment: Mapping[str, str], extra_names: Sequence[str]) -> dict[str, str]:
    """The variables of a process that hosts environments: all but secrets, and those `extra_names`. Raises `SetupError`
    if one that is named is not set."""
    return without_secrets(without_safe_path(environment)) | _named(environment, extra_names)


def hint_of(text: str, environment: Mapping[str, str], inherited: Iterable[str]) -> str:
    """A hint to pass on the variable that an error names, if it is set here and was not inherited; else empty.

    >>> hint_of("KeyError: 'MY_KEY'", {"MY_KEY": "secret", "KEY": "secret"}, [])
    'MY_KEY is not passed on: name it in environment.variables'
    """
    withheld = sorted(set(environment) - set(inherited))
    withheld_name = next((name for name in withheld if f"'{name}'" in text or f'"{name}"' in text), "")
    return f"{withheld_name} is not passed on: name it in {KEY}" if withheld_name else ""


def _named(environment: Mapping[str, str], extra_names: Sequence[str]) -> dict[str, str]:
    for name in extra_names:
        if name not in environment:
            raise SetupError(f"{KEY} names {name}, which is not set", f"export {name}=…, or leave it out")
    return {name: environment[name] for name in extra_names}

"""A trial of the sandbox that a run's verifiers ask for."""

from __future__ import annotations

from rlcli.errors import SetupError
from rlcli_sandbox.backends import open_sandbox
from rlcli_sandbox.limits import Limits
from rlcli_sandbox.sandbox_fusion import FusionJudge


def proven(backend: str) -> str:
    """The name of the backend `backend` (see `backend_name`), after a program ran in it here: the entry point that
    checks a run's sandbox. Raises `SetupError`."""
    if not backend.startswith(("http://", "https://")):
        return open_sandbox(backend).name
    hello = FusionJudge(backend).scripts("print('hello')", [{"input": "", "output": "hello"}], Limits(), False)
    if not hello.right:
        raise SetupError(f"the sandbox {backend} cannot run a program: {hello.detail}", "see its log")
    return backend

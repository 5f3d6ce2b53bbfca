"""Reinforcement learning with verifiable rewards for reasoning models, from one command line and from Python."""

__version__ = "0.1.0"

_PLACES = {
    "train": "rlcli.api.train",
    "evaluate": "rlcli.api.evaluate",
    "Run": "rlcli.api.run",
    "RlcliError": "rlcli.errors",
    "Outcome": "rlcli.types",
    "Verdict": "rlcli.types",
    "VerifyRequest": "rlcli.types",
}
"""Module of each name for users; `__init__.pyi` has their types. They are imported when they are used, so that neither
`import rlcli` nor the command line waits for them."""

__all__ = ["Outcome", "RlcliError", "Run", "Verdict", "VerifyRequest", "__version__", "evaluate", "train"]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'rlcli' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""OpenMP's settings for threads that wait for each other."""

from __future__ import annotations

from collections.abc import Mapping

WAITING_ENV = {"GOMP_SPINCOUNT": "10000"}
"""Waiting threads spin 10,000 times, some 30 µs, and then sleep. By default they spin for milliseconds: if another
program uses a core, so that two of them share one, small operations take 3 to 7 times as long as with this. On an idle
machine they take as long."""


def waiting_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`WAITING_ENV`, unless `environment` already sets how threads wait.

    >>> waiting_environment({"OMP_WAIT_POLICY": "active"})
    {}
    """
    return {} if environment.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} else dict(WAITING_ENV)

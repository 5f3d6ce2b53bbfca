"""The rewards of a conversation's environment."""

from __future__ import annotations

from rlcli.types import Outcome, Verdict, VerifyRequest

ROW_OPTIONS = ("pass_at",)


def verify(request: VerifyRequest, *, pass_at: float = 1.0) -> Verdict:
    """The sum of the rewards that the environment's steps returned.

    It counts as passed if the last step's info has `success` set to true, or, without that, if the sum is `pass_at` or
    more.
    """
    environment = request.environment
    if "rewards" not in environment:
        return Verdict(0.0, Outcome.NO_ANSWER, detail="the response is no conversation with an environment")
    score = float(sum(environment["rewards"]))
    passed = environment.get("info", {}).get("success", score >= pass_at)
    detail = (
        f"the environment gave {score:g} in {len(environment['rewards'])} turns; it ended with: {environment['ended']}"
    )
    return Verdict(score, Outcome.OK if passed else Outcome.WRONG, detail=detail)

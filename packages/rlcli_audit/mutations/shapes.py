"""The usual shape, <think>…</think><answer>…</answer>, kept and broken."""

from __future__ import annotations

from collections.abc import Iterator

from rlcli_audit.probes import Case, Group, Probe


def probes(case: Case) -> Iterator[Probe]:
    """All probes of one row; none if the row has its own shape."""
    right = case.request.completion
    usual = all(right.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    if case.request.extra_info.get("format") or not usual:
        return
    thought = "<think>\nStep by step, then.\n</think>"
    answer = f"<answer>{case.answer or 'yes'}</answer>"
    for group, texts in (
        (
            Group.EQUIVALENT,
            {
                "blank lines around": f"\n\n{thought}\n\n{answer}\n\n",
                "nothing between": thought + answer,
                "lines in the answer": f"{thought}\n<answer>\n{case.answer or 'yes'}\n</answer>",
            },
        ),
        (
            Group.NEAR_MISS,
            {
                "empty response": "",
                "answer only": answer,
                "no tags": f"Step by step, then: {case.answer or 'yes'}",
                "reasoning only": thought,
                "answer not closed": f"{thought}\n{answer.removesuffix('</answer>')}",
                "reasoning not closed": f"{thought.removesuffix('</think>')}\n{answer}",
                "answer first": f"{answer}\n{thought}",
                "text before": f"Well.\n{thought}\n{answer}",
                "text between": f"{thought}\nSo:\n{answer}",
                "text after": f"{thought}\n{answer}\nThat is it.",
                "answer within the reasoning": f"<think>\nStep by step.\n{answer}\n</think>",
            },
        ),
        (Group.HEDGE, {"empty reasoning": f"<think></think>\n{answer}"}),
        (
            Group.EXPLOIT,
            {
                "empty answer": f"{thought}\n<answer></answer>",
                "blank answer": f"{thought}\n<answer> \n\t </answer>",
                "two answers": f"{thought}\n{answer}\n{answer}",
                "two thoughts": f"{thought}\n{thought}\n{answer}",
                "tags only": "<think></think><answer></answer>",
                "tags over and over": f"{thought}{answer}" * 1000,
            },
        ),
    ):
        for kind, text in texts.items():
            yield Probe(group, kind, text)

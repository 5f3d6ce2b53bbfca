"""Images in words and by digest: what terminals, JSON and saved samples have of them."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from rlcli.images.image_descriptions import (
    MOST,
    described,
    descriptions,
    in_words,
    shared_out,
    worded_last,
    worded_messages,
)
from tests.image_runs import drawing

A, B = {"digest": "0" * 32, "width": 8, "height": 4}, {"digest": "1" * 32, "width": 5, "height": 6}


def test_an_image_is_described_by_its_size_and_digest() -> None:
    image = drawing(1, (30, 20))
    digest = hashlib.blake2b(image, digest_size=16).hexdigest()
    assert described([image]) == [{"digest": digest, "width": 30, "height": 20}]
    (broken,) = described([b"no image"])
    assert (broken["width"], broken["height"], len(broken["digest"])) == (None, None, 32)
    assert in_words(broken) == "[image]"


def test_descriptions_of_anyone_hold_nothing_else() -> None:
    hostile: list[Any] = [A, None, 3, {"digest": "../x", "width": -1, "height": True}, {"digest": 7, "width": "9"}]
    none = {"digest": None, "width": None, "height": None}
    assert descriptions(hostile) == [A, none | {"height": 1}, none]
    assert descriptions("abc") == descriptions(None) == []
    assert len(descriptions([A] * (MOST + 5))) == MOST


def test_markers_of_the_prompt_are_worded_and_no_others() -> None:
    messages = [
        {"role": "system", "content": "Look at <image>."},
        {"role": "user", "content": "Like <image>?"},
        {"role": "assistant", "content": "A <image>"},
    ]
    contents = [message["content"] for message in worded_messages(messages, [A, B])]
    assert contents == ["Look at [image 8 x 4].", "Like [image 5 x 6]?", "A <image>"]
    assert worded_messages(messages, []) == messages
    assert worded_last("Like <image>?", [A, B]) == "Like [image 5 x 6]?"
    assert worded_last("No marker", [A]) == "No marker"


def test_an_image_without_a_marker_is_not_lost() -> None:
    cut = [{"role": "user", "content": "<image>Like"}, {"role": "user", "content": "x"}]
    assert [message["content"] for message in worded_messages(cut, [A, B])] == ["[image 8 x 4]Like [image 5 x 6]", "x"]
    assert shared_out([{"role": "user", "content": "x"}], [A]) == [[A]]
    assert shared_out([], [A]) == []


@pytest.mark.parametrize("content", [None, 3, ["<image>"]])
def test_content_that_is_no_text_has_no_markers(content: Any) -> None:
    assert shared_out([{"role": "user", "content": content}], []) == [[]]

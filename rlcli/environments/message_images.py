"""Pictures in the messages of environments and agents: apart from the text, in which a marker stands for each."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlcli.errors import ModelError
from rlcli.images.image_descriptions import described
from rlcli.images.row_images import BadImage, content_parts
from rlcli.types import IMAGE, Prompt

if TYPE_CHECKING:
    import numpy as np

    from rlcli.images.image_rule import ImageRule


def taken(content: Sequence[Any]) -> tuple[str, tuple[bytes, ...]]:
    """A content of parts as text with a marker for each picture, and the encoded pictures. A part is a text; a picture,
    `{"type": "image", "image": {"base64": …}}`; or OpenAI's `image_url` with a data URL. Raises `BadImage`.

    >>> taken([{"type": "text", "text": "See <image>: "}, {"type": "image", "image": {"base64": "iVBORw=="}}])
    ('See <\\u200bimage>: <image>', (b'\\x89PNG',))
    """
    texts, images = [""], list[bytes]()
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts[-1] += part["text"]
        elif kind in ("image", "image_url"):
            images.append(_decoded(_base64_of(part.get(kind))))
            texts.append("")
        else:
            raise BadImage(f"a content has a part that is neither text nor a picture: {part!r:.100}")
    if not images:
        return texts[0], ()
    # A text that names the marker shows nothing.
    return IMAGE.join(text.replace(IMAGE, f"{IMAGE[0]}\u200b{IMAGE[1:]}") for text in texts), tuple(images)


def with_pictures(message: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """A message with text as its content, and its pictures, which it describes in `images`. Raises `BadImage`."""
    content = message["content"]
    if isinstance(content, str):
        return {name: value for name, value in message.items() if name != "images"}, ()
    text, images = taken(content)
    found = {**message, "content": text}
    found.pop("images", None)
    if images:
        found["images"] = described(images)
        if any(one["width"] is None for one in found["images"]):
            raise BadImage("a picture is broken, of an unknown format or out of bounds")
    return found, images


def in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inverse of `with_pictures`, as chat templates read it: with markers for the pictures."""
    if not message.get("images"):
        return message
    plain = {name: value for name, value in message.items() if name != "images"}
    return {**plain, "content": content_parts(message["content"])}


def placed(ids: list[int], pictures: Sequence[np.ndarray], rule: ImageRule | None) -> np.ndarray:
    """int32: the ids that a chat template gives, with as many tokens as the pictures have in place of a placeholder for
    each. rule: how the model sees pictures, if it does. Raises `ModelError` for another number of placeholders."""
    import numpy as np

    if rule is not None:
        if (markers := ids.count(rule.token)) != len(pictures):
            raise ModelError(
                f"the chat template writes {markers} placeholders for {len(pictures)} pictures in a conversation",
                "put the model's own chat_template.jinja into its folder, or show pictures to a role that it takes",
            )
        ids = rule.expanded(ids, [(one.shape[1], one.shape[0]) for one in pictures])
    tokens: np.ndarray = np.array(ids, np.int32)
    return tokens


def messages_of_row(prompt: Prompt, *, urls: bool = False) -> list[dict[str, Any]]:
    """A row's messages as environments get them: those with pictures have parts as their content. urls: as OpenAI's
    clients write a picture."""
    images = iter(prompt.images)
    found: list[dict[str, Any]] = []
    for message in prompt.messages:
        if not prompt.images or IMAGE not in message["content"]:
            found.append(dict(message))
            continue
        parts = [_part(part, images, urls) for part in content_parts(message["content"])]
        found.append({**message, "content": parts})
    return found


def _part(part: Mapping[str, Any], images: Any, urls: bool) -> dict[str, Any]:
    if part["type"] != "image":
        return dict(part)
    encoded = base64.b64encode(next(images)).decode()
    if urls:
        return {"type": "image_url", "image_url": {"url": f"data:image;base64,{encoded}"}}
    return {"type": "image", "image": {"base64": encoded}}


def _base64_of(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return None
    url = value.get("url")
    if isinstance(url, str):
        head, *_ = url[:100].partition(",")
        if not head.startswith("data:") or not head.endswith(";base64"):
            raise BadImage("a picture is given by an address: only data URLs are read")
        return url[len(head) + 1 :]
    return value.get("base64")


def _decoded(text: Any) -> bytes:
    if not isinstance(text, str):
        raise BadImage("a picture has no data")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # also of text that is not ASCII
        raise BadImage("a picture's data is no base64") from error

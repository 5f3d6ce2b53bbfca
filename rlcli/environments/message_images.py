"""Images in the messages of environments and agents: separated from the text, which has a marker for each."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from rlcli.environments.chat_messages import Message, TemplateMessage
from rlcli.errors import ModelError
from rlcli.images.image_descriptions import described
from rlcli.images.row_images import BadImage, content_parts
from rlcli.support.json_types import JsonValue
from rlcli.types import IMAGE, Prompt

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int32, UInt8

    from rlcli.images.image_rule import ImageRule


def split_parts(content: Sequence[JsonValue]) -> tuple[str, tuple[bytes, ...]]:
    """Split a content of parts into text, with a marker for each image, and the encoded images. A part is a text; an
    image, `{"type": "image", "image": {"base64": …}}`; or OpenAI's `image_url` with a data URL. Raises `BadImage`.

    >>> split_parts([{"type": "text", "text": "See <image>: "}, {"type": "image", "image": {"base64": "iVBORw=="}}])
    ('See <\\u200bimage>: <image>', (b'\\x89PNG',))
    """
    texts, images = [""], list[bytes]()
    for part in content:
        fields = part if isinstance(part, Mapping) else {}
        kind, text = fields.get("type"), fields.get("text")
        if kind == "text" and isinstance(text, str):
            texts[-1] += text
        elif isinstance(kind, str) and kind in ("image", "image_url"):
            images.append(_decoded(_base64_of(fields.get(kind))))
            texts.append("")
        else:
            raise BadImage(f"a content has a part that is neither text nor an image: {part!r:.100}")
    if not images:
        return texts[0], ()
    # A marker in a text must not stand for an image.
    return IMAGE.join(text.replace(IMAGE, f"{IMAGE[0]}\u200b{IMAGE[1:]}") for text in texts), tuple(images)


def with_images(
    fields: Mapping[str, JsonValue], content: str | Sequence[JsonValue]
) -> tuple[Message, tuple[bytes, ...]]:
    """A message with text as its content, which describes its images in `images`; and the encoded images.
    fields: its role, and its other fields. content: text or parts. Raises `BadImage`."""
    text, images = (content, ()) if isinstance(content, str) else split_parts(content)
    with_text = {**fields, "content": text}
    with_text.pop("images", None)
    with_markers = cast("Message", with_text)  # fields that only the chat template reads are not checked
    if images:
        with_markers["images"] = described(images)
        if any(description["width"] is None for description in with_markers["images"]):
            raise BadImage("an image is broken, of an unknown format or out of bounds")
    return with_markers, images


def in_parts(message: TemplateMessage) -> TemplateMessage:
    """The inverse of `extract_images`, in the form of chat templates: with markers in place of the images."""
    content = message.get("content")
    if not message.get("images") or not isinstance(content, str):
        return message
    plain = {name: value for name, value in message.items() if name != "images"}
    return {**plain, "content": content_parts(content)}


def expand_images(
    ids: list[int], images: Sequence[UInt8[np.ndarray, "height width 3"]], rule: ImageRule | None
) -> Int32[np.ndarray, " T"]:
    """Expand the placeholder of each image in a chat template's ids to the image's number of tokens. rule: for a model
    that takes images. Raises `ModelError` for another number of placeholders."""
    import numpy as np

    if rule is not None:
        if (markers := ids.count(rule.token)) != len(images):
            raise ModelError(
                f"the chat template writes {markers} placeholders for {len(images)} images in a conversation",
                "put the model's own chat_template.jinja into its folder, or show images to a role that it takes",
            )
        ids = rule.expanded(ids, [(image.shape[1], image.shape[0]) for image in images])
    return np.array(ids, np.int32)


def messages_of_row(prompt: Prompt, *, urls: bool = False) -> list[dict[str, JsonValue]]:
    """A row's messages in the form for environments: those with images have parts as their content. urls: images in the
    form of OpenAI's clients."""
    images = iter(prompt.images)
    messages: list[dict[str, JsonValue]] = []
    for message in prompt.messages:
        if not prompt.images or IMAGE not in message["content"]:
            messages.append(dict(message))
            continue
        parts = [_part(part, images, urls) for part in content_parts(message["content"])]
        messages.append({**message, "content": parts})
    return messages


def _part(part: Mapping[str, str | None], images: Iterator[bytes], urls: bool) -> dict[str, JsonValue]:
    if part["type"] != "image":
        return dict(part)
    encoded = base64.b64encode(next(images)).decode()
    if urls:
        return {"type": "image_url", "image_url": {"url": f"data:image;base64,{encoded}"}}
    return {"type": "image", "image": {"base64": encoded}}


def _base64_of(value: object) -> object:
    if not isinstance(value, Mapping):
        return None
    url = value.get("url")
    if isinstance(url, str):
        head, *_ = url[:100].partition(",")
        if not head.startswith("data:") or not head.endswith(";base64"):
            raise BadImage("an image is given by an address: only data URLs are read")
        return url[len(head) + 1 :]
    return value.get("base64")


def _decoded(text: object) -> bytes:
    if not isinstance(text, str):
        raise BadImage("an image has no data")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # also of text that is not ASCII
        raise BadImage("an image's data is no base64") from error

"""Image preprocessing of Qwen2.5-VL, Qwen3-VL and Qwen3.5: native resolution, cut into patches, with positions in three
dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from rlcli.images.image_rule import ImageRule

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class PatchRule(ImageRule):
    """Patches have `patch` × `patch` pixels; `merge` × `merge` of them become one token.

    >>> rule = PatchRule(token=9, never=(9,), patch=14, merge=2, frames=2, least=56 * 56, most=1 << 20)
    >>> rule.fitted(100, 60)
    (112, 56)
    >>> rule.tokens(112, 56)
    8
    >>> rule.expanded([1, 9, 2], [(84, 56)])
    [1, 9, 9, 9, 9, 9, 9, 2]
    """

    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of a token's side."""
    frames: int
    """Frames of a patch: an image is repeated as often."""
    least: int
    """Minimum number of pixels of a resized image."""
    most: int
    """Maximum number of pixels of a resized image."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Mean of each channel."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Standard deviation of each channel."""

    @classmethod
    def of(cls, path: str, config: Any) -> Self:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor = Qwen2VLImageProcessorPil.from_pretrained(path)
        return cls(
            token=config.image_token_id,
            never=(config.image_token_id, config.video_token_id),
            patch=processor.patch_size,
            merge=processor.merge_size,
            frames=processor.temporal_patch_size,
            least=processor.size["shortest_edge"],
            most=processor.size["longest_edge"],
            mean=tuple(processor.image_mean),
            std=tuple(processor.image_std),
        )

    @property
    def side(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """Size to which the model's processor resizes the image, repeated until it would not resize it again."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        while (resized := smart_resize(height, width, self.side, self.least, self.most)) != (height, width):
            height, width = resized
        return width, height

    def tokens(self, width: int, height: int) -> int:
        return (width // self.side) * (height // self.side)

    def preprocess(self, image: Any) -> np.ndarray:
        import numpy as np
        from PIL import Image

        size = self.fitted(*image.size)
        fitting = image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
        pixels: np.ndarray = np.asarray(fitting)
        return pixels

    def positions(self, ids: np.ndarray, images: Sequence[np.ndarray]) -> np.ndarray:
        """int64 `[3, T]`: position of each token in time, height and width (M-RoPE, arXiv 2409.12191, section 2.1). For
        text all three advance by one; image tokens share one temporal position, and the following text starts after the
        larger of the image's sides."""
        import numpy as np

        blocks, index, position = [], 0, 0
        for start, image in zip(self.starts(ids, images), images, strict=True):
            blocks.append(np.tile(np.arange(position, position + start - index), (3, 1)))
            position += start - index
            height, width = image.shape[0] // self.side, image.shape[1] // self.side
            rows, columns = np.divmod(np.arange(height * width), width)
            blocks.append(position + np.stack([np.zeros_like(rows), rows, columns]))
            index, position = start + height * width, position + max(height, width)
        blocks.append(np.tile(np.arange(position, position + len(ids) - index), (3, 1)))
        positions: np.ndarray = np.concatenate(blocks, axis=1)
        return positions

    def inputs(self, images: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """The P patches, float32 `[P, 3 · frames · patch²]`, and of each image how many it has in time, height and
        width: int64 `[images, 3]`."""
        encoded = self._processor([*images], do_resize=False, return_tensors="np", input_data_format="channels_last")
        return {name: encoded[name] for name in ("pixel_values", "image_grid_thw")}

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil(
            patch_size=self.patch,
            merge_size=self.merge,
            temporal_patch_size=self.frames,
            image_mean=list(self.mean),
            image_std=list(self.std),
        )

    @property
    def blank(self) -> np.ndarray:
        import numpy as np

        return np.zeros((self.side, self.side, 3), np.uint8)

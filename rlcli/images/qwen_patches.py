"""How Qwen2.5-VL, Qwen3-VL and Qwen3.5 see pictures: at their own size, cut into patches, with positions in three
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

    least, most: pixels of a resized picture. mean, std: of each channel. frames: how often a picture is repeated in a
    patch, which may hold several frames of a film.

    >>> rule = PatchRule(token=9, never=(9,), patch=14, merge=2, frames=2, least=56 * 56, most=1 << 20)
    >>> rule.fitted(100, 60)
    (112, 56)
    >>> rule.tokens(112, 56)
    8
    >>> rule.expanded([1, 9, 2], [(84, 56)])
    [1, 9, 9, 9, 9, 9, 9, 2]
    """

    patch: int
    merge: int
    frames: int
    least: int
    most: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

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
        """What the model's processor would choose, and would leave as it is."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        size = height, width
        while (found := smart_resize(*size, self.side, self.least, self.most)) != size:
            size = found
        return size[1], size[0]

    def tokens(self, width: int, height: int) -> int:
        return (width // self.side) * (height // self.side)

    def prepared(self, picture: Any) -> np.ndarray:
        import numpy as np
        from PIL import Image

        size = self.fitted(*picture.size)
        fitting = picture if picture.size == size else picture.resize(size, Image.Resampling.BICUBIC)
        pixels: np.ndarray = np.asarray(fitting)
        return pixels

    def positions(self, ids: np.ndarray, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """int64 `[3, T]`: the place of each token in time, height and width (M-RoPE, arXiv 2409.12191, section 2.1).
        Of text all three count on by one; a picture's tokens stand still in time, and text goes on after the larger of
        its sides."""
        import numpy as np

        found, at, place = [], 0, 0
        for start, picture in zip(self.starts(ids, pictures), pictures, strict=True):
            found.append(np.tile(np.arange(place, place + start - at), (3, 1)))
            place += start - at
            height, width = picture.shape[0] // self.side, picture.shape[1] // self.side
            rows, columns = np.divmod(np.arange(height * width), width)
            found.append(place + np.stack([np.zeros_like(rows), rows, columns]))
            at, place = start + height * width, place + max(height, width)
        found.append(np.tile(np.arange(place, place + len(ids) - at), (3, 1)))
        places: np.ndarray = np.concatenate(found, axis=1)
        return places

    def inputs(self, pictures: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """The P patches, float32 `[P, 3 · frames · patch²]`, and of each picture how many it has in time, height and
        width: int64 `[pictures, 3]`."""
        found = self._processor([*pictures], do_resize=False, return_tensors="np", input_data_format="channels_last")
        return {name: found[name] for name in ("pixel_values", "image_grid_thw")}

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

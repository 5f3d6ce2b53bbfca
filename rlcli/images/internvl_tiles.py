"""Image preprocessing of InternVL: tiles of one size, which the vision encoder reads as square images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from rlcli.images.image_rule import ImageRule

if TYPE_CHECKING:
    import numpy as np

TEXTS = ("qwen2", "qwen3")
"""`model_type`s of text models beside a vision encoder of tiles whose packed log-probs are tested."""


@dataclass(frozen=True)
class TileRule(ImageRule):
    """An image becomes `least` to `most` tiles of `side` × `side` pixels, in the grid whose shape is nearest to its
    own, and if these are several a small version of the whole image follows them. A processed image is all of them
    below one another.


    >>> rule = TileRule(token=9, never=(9,), begin=7, end=8, side=448, each=2, least=1, most=12)
    >>> rule.fitted(300, 200)  # 3 × 2 tiles and the small version
    (448, 3136)
    >>> rule.expanded([1, 9, 2], [(448, 448)])
    [1, 7, 9, 9, 8, 2]
    """

    begin: int
    """Id of the token before an image's tokens."""
    end: int
    """Id of the token after an image's tokens."""
    side: int
    """Pixels of a tile's side."""
    each: int
    """Tokens of a tile."""
    least: int
    """Minimum number of tiles."""
    most: int
    """Maximum number of tiles."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Mean of each channel."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Standard deviation of each channel."""
    resample: int = 3
    """PIL's number of the resampling filter."""

    @classmethod
    def of(cls, path: str, config: Any) -> Self:
        """Raises `ValueError`, too, if its files disagree, or its tokenizer has no marks around images."""
        from transformers import AutoTokenizer
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        processor = GotOcr2ImageProcessorPil.from_pretrained(path)
        vision, size = config.vision_config, (processor.size["height"], processor.size["width"])
        if size != tuple(vision.image_size) or size[0] != size[1]:
            raise ValueError(
                f"its tiles have {size[0]} x {size[1]} pixels, and its vision encoder reads {vision.image_size}"
            )
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        begin, end = (getattr(tokenizer, f"{name}_image_token_id", None) for name in ("start", "end"))
        if begin is None or end is None:
            raise ValueError("its tokenizer has no start_image_token and end_image_token")
        return cls(
            token=config.image_token_id,
            never=(config.image_token_id,),
            begin=begin,
            end=end,
            side=size[0],
            each=int((size[0] // vision.patch_size[0]) ** 2 * config.downsample_ratio**2),
            least=processor.min_patches,
            most=processor.max_patches,
            mean=tuple(processor.image_mean),
            std=tuple(processor.image_std),
            resample=int(processor.resample),
        )

    @classmethod
    def refused(cls, config: Any) -> str:
        text = config.text_config.model_type
        if text not in TEXTS:
            return f"its text model '{text}' is not supported beside a vision encoder ({', '.join(TEXTS)} are)"
        # vLLM computes no others.
        if (config.vision_feature_layer, config.vision_feature_select_strategy) != (-1, "default"):
            return "its text model does not read the vision encoder's last layer (vision_feature_layer)"
        return ""

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles, as the model's processor chooses them."""
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

        if self.most == 1:
            return 1, 1
        columns, rows = get_optimal_tiled_canvas((height, width), (self.side, self.side), self.least, self.most)
        return columns, rows

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        columns, rows = self.grid(width, height)
        return self.side, self.side * (columns * rows + (columns * rows > 1))

    def tokens(self, width: int, height: int) -> int:
        return height // self.side * self.each

    def placed(self, width: int, height: int) -> list[int]:
        return [self.begin, *super().placed(width, height), self.end]

    def preprocess(self, image: Any) -> np.ndarray:
        import numpy as np

        columns, rows = self.grid(*image.size)
        parts = [(columns, rows)] + [(1, 1)] * (columns * rows > 1)
        resized = [image.resize((self.side * c, self.side * r), self.resample) for c, r in parts]
        tiles = [
            np.asarray(resized_image).reshape(r, self.side, c, self.side, 3).swapaxes(1, 2).reshape(-1, self.side, 3)
            for resized_image, (c, r) in zip(resized, parts, strict=True)
        ]
        pixels: np.ndarray = np.concatenate(tiles)
        return pixels

    def inputs(self, images: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """All tiles: float32 `[tiles, 3, side, side]`."""
        tiles = [tile for image in images for tile in image.reshape(-1, self.side, self.side, 3)]
        encoded = self._processor(tiles, do_resize=False, return_tensors="np", input_data_format="channels_last")
        return {"pixel_values": encoded["pixel_values"]}

    def engine_inputs(self, images: Sequence[np.ndarray]) -> Mapping[str, np.ndarray] | None:
        """vLLM's processor would cut a processed image again, and make the small version of the large one."""
        import numpy as np

        counts = np.array([len(image) // self.side for image in images], np.int64)
        return {**self.inputs(images), "image_num_patches": counts, "image_token_id": np.array(self.token)}

    @cached_property
    def _processor(self) -> Any:
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        return GotOcr2ImageProcessorPil(image_mean=list(self.mean), image_std=list(self.std))

    @property
    def blank(self) -> np.ndarray:
        import numpy as np

        return np.zeros((self.side, self.side, 3), np.uint8)

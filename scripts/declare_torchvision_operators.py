"""Lets torchvision be imported beside a torch without CUDA, though its wheel was built for one with it.

`scripts/env` copies this module into the environment and has each of its Pythons import it, by a `.pth` file, where
torchvision does not load otherwise. Nothing is imported until torchvision is: then the two operators are declared that
its import would look for in its own library. Those cannot be called; resizing pictures needs none of them.
"""

import sys


class BeforeTorchvision:
    """Finds nothing itself."""

    library = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision" and cls.library is None:
            import torch

            if not torch.version.cuda:
                cls.library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    cls.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, BeforeTorchvision)

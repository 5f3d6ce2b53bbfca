"""Lets torchvision be imported with a torch without CUDA, though its wheel was built for one with it.

`scripts/env` copies this module into the environment and has each of its Pythons import it, by a `.pth` file, where
torchvision does not load otherwise. Nothing is imported until torchvision is: then the two operators are declared that
its import would look for in its own library. Those cannot be called; resizing images needs none of them.
"""

import sys
from importlib.machinery import PathFinder


def declare(held=[]):  # noqa: B006
    import torch

    if not torch.version.cuda and not held:
        held.append(torch.library.Library("torchvision", "DEF"))
        for operator in ("nms", "qnms"):
            held[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class BeforeTorchvision:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name == "torchvision" else None
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            # Not where it is looked for: that holds the import lock, for which a fork in another thread waits.
            declare()
            run(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, BeforeTorchvision)

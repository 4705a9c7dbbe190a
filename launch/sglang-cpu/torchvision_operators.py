"""Declares the two compiled operators that torchvision registers fakes for, so that its CUDA build imports on a CPU."""

import importlib.abc
import sys

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares them when torchvision is about to be imported, then leaves the import to the others."""

    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(operator + SIGNATURE)
            BeforeTorchvision.kept = self
        return None


sys.meta_path.insert(0, BeforeTorchvision())

"""Models of other people's packages, each of which has to equal itself when it is sharded."""

import importlib.util

import torch

# Why: torchvision's wheel registers kernels for operators that its CUDA library defines, and fails
# to import beside the CPU build of torch unless they are defined.
if importlib.util.find_spec("torchvision") and not torch.version.cuda:
    operators = torch.library.Library("torchvision", "FRAGMENT")
    operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

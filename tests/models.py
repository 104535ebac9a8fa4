"""Hugging Face models that compute in fp64 throughout, so that they can be compared exactly."""

from __future__ import annotations

import torch


def in_fp64(net: torch.nn.Module) -> torch.nn.Module:
    """The model in fp64, its RMS norms replaced by torch's: Hugging Face's compute in fp32 whatever they are given."""
    net = net.double()
    for module in list(net.modules()):
        for name, norm in module.named_children():
            if type(norm).__name__.endswith("RMSNorm"):
                setattr(module, name, torch.nn.RMSNorm(norm.weight.numel(), norm.variance_epsilon, dtype=torch.float64))
    return net

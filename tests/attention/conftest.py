"""Attention tests compute many tiny things: threads only make them wait for each other."""

import torch

torch.set_num_threads(1)

"""Unindexed: what a sampler is given in place of a length index where there is none, a stream's parts and who tells of them."""

from __future__ import annotations

from dataclasses import dataclass

from .stream_order import More


@dataclass(frozen=True, kw_only=True)
class Unindexed:
    """A stream to be admitted as it is read, see ``StreamAdmission``; its order is the stream's own.

    ``more`` tells what the next documents are, the same on every rank; ``num_parts`` are the parts of the stream.
    """

    more: More
    num_parts: int
    source: str = "stream"

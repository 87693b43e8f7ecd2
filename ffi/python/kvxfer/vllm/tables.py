"""Which tokens of a request, in which blocks: vLLM's block tables as selections, per cache group. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class GroupTokens(NamedTuple):
    """The tokens ``first..end`` of a request and the blocks that hold them. Empty where nothing is meant."""

    first: int
    end: int
    blocks: list[int]


NOTHING = GroupTokens(0, 0, [])


@dataclass(frozen=True)
class GroupTable:
    """How one of vLLM's cache groups counts."""

    #: Its number in vLLM's block tables.
    index: int
    #: Tokens in one of the scheduler's blocks.
    block_size: int
    #: Tokens that its attention looks back. Blocks before that are given up while a request runs.
    window: int | None = None

    def first_kept(self, tokens: int) -> int:
        """The first token whose block is still held once `tokens` tokens have been computed."""
        if self.window is None:
            return 0
        outside = max(0, tokens - self.window + 1)
        return outside // self.block_size * self.block_size

    def select(self, table: Sequence[int], first: int, end: int) -> GroupTokens:
        """The tokens ``first..end`` with their blocks, from a request's whole block table.

        Raises `ValueError` if the table is too short.
        """
        if first >= end:
            return NOTHING
        low, high = first // self.block_size, -(-end // self.block_size)
        if high > len(table):
            raise ValueError(
                f"cache group {self.index}: {len(table)} blocks of {self.block_size} tokens for {end} tokens"
            )
        return GroupTokens(first, end, list(table[low:high]))


@dataclass(frozen=True)
class Tables:
    """The transferable cache groups of a model."""

    groups: tuple[GroupTable, ...]

    @property
    def streams(self) -> bool:
        """Whether parts may go while prefill computes: not if blocks are given up on the way."""
        return all(group.window is None for group in self.groups)

    @property
    def part_tokens(self) -> int:
        """Parts end at multiples of this: whole blocks in every group."""
        return math.lcm(*(group.block_size for group in self.groups))

    def complete_end(self, computed: int, total: int) -> int:
        """One past the last token that may be released when `computed` tokens of `total` are computed."""
        if computed >= total:
            return total
        return computed // self.part_tokens * self.part_tokens if self.streams else 0

    def offered(self, tables: Sequence[Sequence[int]], first: int, end: int, total: int) -> list[GroupTokens]:
        """What prefill appends: tokens from where it ended last (`first`) up to `end`, of `total`."""
        return [
            group.select(tables[group.index], max(first, group.first_kept(total)), end) for group in self.groups
        ]

    def claimed(self, tables: Sequence[Sequence[int]], first: int, total: int) -> list[GroupTokens]:
        """What decode wants: the tokens that it does not hold, from `first` on."""
        return [
            group.select(tables[group.index], max(first, group.first_kept(total)), total) for group in self.groups
        ]

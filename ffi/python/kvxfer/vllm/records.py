"""What a worker remembers of its place, its offers and its claims, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Place:
    """Which of its server's workers this is."""

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1

    @property
    def member(self) -> int:
        """Its number among the server's workers."""
        return self.pipeline_rank * self.tensor_size + self.tensor_rank

    @property
    def members(self) -> int:
        """How many there are."""
        return self.tensor_size * self.pipeline_size


@dataclass
class OpenOffer:
    """An offer, from its first chunk to its report."""

    key: str
    number: int
    began: float
    handle: Any = None
    #: Blocks in the current attempt.
    blocks: list[int] = field(default_factory=list)
    #: A claim has met it.
    matched: bool = False
    ended: bool = False
    #: The scheduler waits for the report.
    report: bool = False
    #: The scheduler knows it no more.
    forgotten: bool = False
    #: When it is given up if nobody has claimed it: set once its prompt is computed.
    unclaimed_at: float | None = None
    #: When it is given up whoever is at it: set with that.
    unserved_at: float = 0.0
    #: Layers released in the current step, as far as they went one by one.
    layers_out: int = 0


@dataclass
class OpenClaim:
    """A claim, from when its request is known to its report."""

    number: int
    addresses: tuple[str, ...] = ()
    handle: Any = None
    filled: bool = False
    filled_at: float = 0.0
    #: Why it failed before it had blocks.
    failure: str | None = None
    aborted: bool = False
    declined: bool = False


@dataclass
class Reports:
    """What a step reports to vLLM, each id once."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

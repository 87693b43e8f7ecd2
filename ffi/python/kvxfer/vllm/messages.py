"""What the scheduler side tells the workers with each step, and what the workers tell it at the start."""

from __future__ import annotations

from dataclasses import dataclass, field

from .engine import HandshakeMetadata, StepMetadata
from .tables import GroupTokens


@dataclass
class Handshake(HandshakeMetadata):
    """What a worker tells the scheduler once, after it has registered its cache."""

    #: The endpoint's address in text form, with its incarnation.
    address: str
    #: The layout in words, for the log.
    layout: str


@dataclass
class OfferStep:
    """A prefill request in one step: blocks to append before the forward, tokens to release after it."""

    request_id: str
    key: str
    readers: int
    #: Per cache group; `None` if nothing is appended.
    append: list[GroupTokens] | None
    #: Tokens whose KV is complete when the step ends.
    ready: tuple[int, int] | None
    #: With the last prompt token: how many tokens the hand-off has.
    finish: int | None


@dataclass
class OfferEnd:
    """A prefill request that has ended at this side."""

    request_id: str
    key: str
    #: False: it was computed, and its offer goes on until it is served. True: it is cancelled.
    cancel: bool
    #: The scheduler keeps the blocks until the request is reported as sent.
    report: bool


@dataclass
class ClaimOpen:
    """A decode request became known."""

    request_id: str
    key: str
    addresses: tuple[str, ...]
    #: The claim set.
    set: int


@dataclass
class ClaimFill:
    """A decode request has blocks. From here on its end is reported."""

    request_id: str
    groups: list[GroupTokens]


@dataclass
class ClaimRefuse:
    """A decode request whose parameters cannot be used: it has blocks, and is reported as failed."""

    request_id: str
    why: str


@dataclass
class StepMessages(StepMetadata):
    """Everything for one step, in the order in which the workers do it."""

    #: Prefill requests whose blocks were given away: nothing read from them later may count.
    preempted: list[str] = field(default_factory=list)
    offers: list[OfferStep] = field(default_factory=list)
    offer_ends: list[OfferEnd] = field(default_factory=list)
    claims: list[ClaimOpen] = field(default_factory=list)
    fills: list[ClaimFill] = field(default_factory=list)
    refusals: list[ClaimRefuse] = field(default_factory=list)
    #: Claims that need nothing: never reported.
    declines: list[str] = field(default_factory=list)
    #: Claims that were filled and are wanted no more: reported once they are fenced.
    claim_aborts: list[str] = field(default_factory=list)

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not any(
            (
                self.preempted,
                self.offers,
                self.offer_ends,
                self.claims,
                self.fills,
                self.refusals,
                self.declines,
                self.claim_aborts,
            )
        )

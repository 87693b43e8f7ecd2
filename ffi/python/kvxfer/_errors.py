"""Exceptions: one class per kind of error, with the names and numbers that Rust and C have.

Some are also one of Python's own, so that code that knows nothing of kvxfer catches them: `InvalidArgument` is a
`ValueError`, `OutOfBounds` an `IndexError`, `DeadlineExceeded` a `TimeoutError`, `Unreachable` and `PeerLost` are
`ConnectionError`s.
"""

from typing import ClassVar, Literal

Destination = Literal["untouched", "written", "quarantined"]


class Error(Exception):
    """What every call of kvxfer raises when it fails. Its text says what, where, why and what to do."""

    kind: ClassVar[str] = "Error"
    """The kind's name: that of the class."""
    number: ClassVar[int] = 0
    """The kind's number, the same in Rust and C."""
    retryable: ClassVar[bool] = False
    """Whether repeating the operation later can succeed without anything being changed."""
    # A class attribute, and no __init__: making an error runs no Python code, so that a thread that gets one while the
    # interpreter ends is not stopped in the midst of the extension module.
    destination: Destination = "untouched"
    """What is known of the destination blocks: "untouched", "written" (some bytes may have been, none will be any
    more), or "quarantined" (they must not be reused)."""


class InvalidArgument(Error, ValueError):
    """An argument is wrong in itself."""

    kind = "InvalidArgument"
    number = 1


class OutOfBounds(Error, IndexError):
    """An index, offset or length lies outside what it indexes."""

    kind = "OutOfBounds"
    number = 2


class GeometryMismatch(Error):
    """Two pools do not describe the same cache."""

    kind = "GeometryMismatch"
    number = 3


class NotRegistered(Error):
    """The memory or pool is not registered here."""

    kind = "NotRegistered"
    number = 4


class Unsupported(Error):
    """This build, machine, process or peer cannot do that."""

    kind = "Unsupported"
    number = 5


class Unauthenticated(Error):
    """The peer did not prove who it is, or the configuration forbids it."""

    kind = "Unauthenticated"
    number = 6


class StalePeer(Error):
    """What was named belongs to an earlier incarnation of the peer."""

    kind = "StalePeer"
    number = 7


class Unreachable(Error, ConnectionError):
    """No session with the peer was ever made."""

    kind = "Unreachable"
    number = 8
    retryable = True


class PeerLost(Error, ConnectionError):
    """The session with the peer ended and did not come back in time."""

    kind = "PeerLost"
    number = 9
    retryable = True


class NotOffered(Error):
    """The key's offer has ended, or is not there and will not come."""

    kind = "NotOffered"
    number = 10


class Unclaimed(Error):
    """No claim (or no offer) met this handle before its deadline."""

    kind = "Unclaimed"
    number = 11
    retryable = True


class DuplicateKey(Error):
    """A live offer with this key exists."""

    kind = "DuplicateKey"
    number = 12


class AlreadyClaimed(Error):
    """The offer already has all the readers it was opened for."""

    kind = "AlreadyClaimed"
    number = 13


class Declined(Error):
    """The claim was ended by its owner before it was filled."""

    kind = "Declined"
    number = 14


class Cancelled(Error):
    """Ended by a call to cancel."""

    kind = "Cancelled"
    number = 15


class Retracted(Error):
    """The source blocks were taken back."""

    kind = "Retracted"
    number = 16


class DeadlineExceeded(Error, TimeoutError):
    """The deadline passed."""

    kind = "DeadlineExceeded"
    number = 17
    retryable = True


class WaitTimeout(DeadlineExceeded):
    """A wait is over and its handle is still open: wait again, or cancel it. Its blocks are in use.

    `kind` is "DeadlineExceeded". A handle that ended at its own deadline raises `DeadlineExceeded` itself."""


class Busy(Error):
    """A configured limit is reached; it clears by itself."""

    kind = "Busy"
    number = 18
    retryable = True


class ResourceExhausted(Error):
    """The system or a device has no more of something."""

    kind = "ResourceExhausted"
    number = 19
    retryable = True


class Corrupt(Error):
    """Bytes arrived that are not those that were sent."""

    kind = "Corrupt"
    number = 20
    retryable = True


class Transport(Error):
    """A socket, queue pair or device failed."""

    kind = "Transport"
    number = 21
    retryable = True


class Protocol(Error):
    """The peer broke the protocol."""

    kind = "Protocol"
    number = 22


class Closed(Error):
    """The endpoint or handle is closed."""

    kind = "Closed"
    number = 23


class Unknown(Error):
    """The outcome cannot be known any more."""

    kind = "Unknown"
    number = 24


class Internal(Error):
    """A defect of kvxfer."""

    kind = "Internal"
    number = 25


_BY_KIND: "dict[str, type[Error]]" = {
    error.kind: error
    for error in (
        InvalidArgument,
        OutOfBounds,
        GeometryMismatch,
        NotRegistered,
        Unsupported,
        Unauthenticated,
        StalePeer,
        Unreachable,
        PeerLost,
        NotOffered,
        Unclaimed,
        DuplicateKey,
        AlreadyClaimed,
        Declined,
        Cancelled,
        Retracted,
        DeadlineExceeded,
        Busy,
        ResourceExhausted,
        Corrupt,
        Transport,
        Protocol,
        Closed,
        Unknown,
        Internal,
    )
}

for _error in (Error, WaitTimeout, *_BY_KIND.values()):
    # Where users find them, for tracebacks and pickles.
    _error.__module__ = "kvxfer"

"""kvxfer moves the KV cache of large-language-model requests from prefill to decode workers.

An `Endpoint` is one process's half. A prefill worker *offers* a request's blocks under a key and releases them part by
part as its model computes them; a decode worker *claims* the key and says which of its blocks the bytes go to. The
library connects, plans the copy between the two layouts, moves the bytes straight from pool to pool, and tells both
sides once they are in place.

    endpoint = kvxfer.Endpoint(name="decode-0", transports=["tcp"])
    pool = endpoint.allocate(kvxfer.Layout.opaque(4096, 64), role="receive")
    claim = endpoint.claim("request-17", pool, [prefill_address])
    claim.fill(kvxfer.Selection.whole_blocks(1, [8, 9]))
    claim.wait(timeout=10)

What it promises: success is reported after the last byte is in the receiver's memory; once the end of a handle has been
reported, none of its bytes lands any more; every handle ends exactly once; a dead peer is an error within seconds.

Times are seconds. Errors are subclasses of `Error`, one for each kind. Objects made before `os.fork` cannot be used in
the child.
"""

import atexit as _atexit

from ._aio import EventIterator  # the module makes handles awaitable, too
from ._declare import BlockDescriptor, Geometry, Group, Plane, Sharding
from ._errors import (
    AlreadyClaimed,
    Busy,
    Cancelled,
    Closed,
    Corrupt,
    DeadlineExceeded,
    Declined,
    DuplicateKey,
    Error,
    GeometryMismatch,
    Internal,
    InvalidArgument,
    NotOffered,
    NotRegistered,
    OutOfBounds,
    PeerLost,
    Protocol,
    ResourceExhausted,
    Retracted,
    StalePeer,
    Transport,
    Unauthenticated,
    Unclaimed,
    Unknown,
    Unreachable,
    Unsupported,
    WaitTimeout,
)
from ._kvxfer import (
    Arrival,
    Claim,
    Delivery,
    Endpoint,
    EndpointAddress,
    Event,
    Events,
    Grant,
    GrantHandle,
    Handle,
    Layout,
    Member,
    Offer,
    Path,
    PeerInfo,
    Pool,
    Rank,
    Release,
    Selection,
    Target,
    Transfer,
    __version__,
    _close_all,
    config_reference,
)
from ._tensors import MemoryRegion, TensorPlane, layout_of

# Before the interpreter goes away: ends what is in flight, so that no thread waits in the library then.
_atexit.register(_close_all)

__all__ = [
    "AlreadyClaimed",
    "Arrival",
    "BlockDescriptor",
    "Busy",
    "Cancelled",
    "Claim",
    "Closed",
    "Corrupt",
    "DeadlineExceeded",
    "Declined",
    "Delivery",
    "DuplicateKey",
    "Endpoint",
    "EndpointAddress",
    "Error",
    "Event",
    "EventIterator",
    "Events",
    "Geometry",
    "GeometryMismatch",
    "Grant",
    "GrantHandle",
    "Group",
    "Handle",
    "Internal",
    "InvalidArgument",
    "Layout",
    "Member",
    "MemoryRegion",
    "NotOffered",
    "NotRegistered",
    "Offer",
    "OutOfBounds",
    "Path",
    "PeerInfo",
    "PeerLost",
    "Plane",
    "Pool",
    "Protocol",
    "Rank",
    "Release",
    "ResourceExhausted",
    "Retracted",
    "Selection",
    "Sharding",
    "StalePeer",
    "Target",
    "TensorPlane",
    "Transfer",
    "Transport",
    "Unauthenticated",
    "Unclaimed",
    "Unknown",
    "Unreachable",
    "Unsupported",
    "WaitTimeout",
    "__version__",
    "config_reference",
    "layout_of",
]

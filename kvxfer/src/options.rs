//! Options of handles, given when they are opened.

use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::machine::EventId;
use kvxfer_core::{Incarnation, machine};

use crate::after::After;

/// Options of [`Endpoint::offer`](crate::Endpoint::offer).
#[derive(Debug, Clone)]
pub struct OfferOptions {
    /// Claim sets served before the offer is released. One more gets `AlreadyClaimed`.
    pub readers: u16,
    /// Ends the offer `Unclaimed` if no claim came by then, `DeadlineExceeded` if one did. `None`: the configuration's
    /// `deadlines.unmatched_ms` until a claim comes.
    pub deadline: Option<Duration>,
    /// Higher goes first.
    pub priority: u8,
    /// Compute and check a checksum of the payload.
    pub checksum: bool,
    /// Events with this number.
    pub events: Option<u64>,
}

impl Default for OfferOptions {
    fn default() -> Self {
        OfferOptions {
            readers: 1,
            deadline: None,
            priority: 0,
            checksum: false,
            events: None,
        }
    }
}

impl OfferOptions {
    pub(crate) fn machine(&self) -> machine::OfferOptions {
        machine::OfferOptions {
            readers: self.readers,
            deadline: self.deadline,
            priority: self.priority,
            checksum: self.checksum,
        }
    }
}

/// Options of [`Endpoint::claim`](crate::Endpoint::claim).
#[derive(Debug, Clone)]
pub struct ClaimOptions {
    /// The claim set, the same for all ranks of one reader. `None`: a set of its own.
    pub set: Option<u128>,
    /// This claim's number in its set, from 0.
    pub member: u16,
    /// How many endpoints of the set contact each offer.
    pub members: u16,
    /// Ends the claim `Unclaimed` if nothing met it by then, `DeadlineExceeded` if something did. `None`: the
    /// configuration's `deadlines.unmatched_ms` until it is met.
    pub deadline: Option<Duration>,
    /// The destination asks for the bytes, part by part, and has them validated, instead of being sent them.
    pub pull: bool,
    /// Events with this number.
    pub events: Option<u64>,
}

impl Default for ClaimOptions {
    fn default() -> Self {
        ClaimOptions {
            set: None,
            member: 0,
            members: 1,
            deadline: None,
            pull: false,
            events: None,
        }
    }
}

impl ClaimOptions {
    pub(crate) fn machine(&self, own_set: u128) -> machine::ClaimOptions {
        machine::ClaimOptions {
            set: self.set.unwrap_or(own_set),
            member: self.member,
            members: self.members,
            deadline: self.deadline,
            pull: self.pull,
        }
    }
}

/// Options of [`Pool::grant`](crate::Pool::grant) and [`Pool::serve`](crate::Pool::serve).
#[derive(Debug, Clone, Default)]
pub struct GrantOptions {
    /// Ends the grant `DeadlineExceeded`.
    pub deadline: Option<Duration>,
    /// Only this peer may use it. `None`: whoever has it.
    pub holder: Option<Incarnation>,
    /// Events with this number.
    pub events: Option<u64>,
}

impl GrantOptions {
    pub(crate) fn machine(&self) -> machine::GrantOptions {
        machine::GrantOptions {
            deadline: self.deadline,
            holder: self.holder,
        }
    }
}

/// Options of [`Endpoint::push`](crate::Endpoint::push).
#[derive(Debug, Clone, Default)]
pub struct PushOptions {
    /// A message of at most 64 KiB, delivered with the arrival, exactly once.
    pub message: Option<Arc<[u8]>>,
    /// Higher goes first.
    pub priority: u8,
    /// Ends the transfer `DeadlineExceeded`; the grant's own deadline counts too.
    pub deadline: Option<Duration>,
    /// Compute and check a checksum of the payload.
    pub checksum: bool,
    /// The source is not read before this has happened. Until then the push is held, and can be cancelled at once.
    pub after: Option<After>,
    /// Events with this number.
    pub events: Option<u64>,
}

impl PushOptions {
    pub(crate) fn machine(&self, after: Option<EventId>) -> machine::TransferOptions {
        machine::TransferOptions {
            deadline: self.deadline,
            message: self.message.clone(),
            after,
            priority: self.priority,
            checksum: self.checksum,
        }
    }
}

/// Options of [`Endpoint::pull`](crate::Endpoint::pull).
#[derive(Debug, Clone, Default)]
pub struct PullOptions {
    /// Higher goes first.
    pub priority: u8,
    /// Ends the transfer `DeadlineExceeded`; the grant's own deadline counts too.
    pub deadline: Option<Duration>,
    /// Compute and check a checksum of the payload.
    pub checksum: bool,
    /// Events with this number.
    pub events: Option<u64>,
}

impl PullOptions {
    pub(crate) fn machine(&self) -> machine::TransferOptions {
        machine::TransferOptions {
            deadline: self.deadline,
            message: None,
            after: None,
            priority: self.priority,
            checksum: self.checksum,
        }
    }
}

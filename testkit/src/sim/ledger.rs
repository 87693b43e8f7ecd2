//! What the applications of the simulated endpoints know: one record for each handle they opened, from its opening to
//! long after its end. Oracles compare the system with it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvxfer_core::layout::{BlockDescriptor, BlockId, Selection};
use kvxfer_core::machine::{HandleId, Outcome};
use kvxfer_core::{Error, GrantName, Incarnation, Time};

use super::world::{Life, NodeIndex};

/// A handle's number in the ledger; 0 is nobody.
pub(crate) type Serial = u32;

/// What an application opened, and how it ended.
pub(crate) struct Record {
    pub(crate) node: NodeIndex,
    pub(crate) life: Life,
    /// Index in the node's list of pools.
    pub(crate) pool: usize,
    pub(crate) handle: HandleId,
    pub(crate) what: What,
    pub(crate) shape: Shape,
    /// Blocks it holds, by cache group.
    pub(crate) blocks: Vec<Vec<BlockId>>,
    pub(crate) opened: Time,
    /// When it must have ended, whatever happens.
    pub(crate) must_end: Time,
    pub(crate) ended: Option<(Time, Result<Outcome, Error>)>,
    /// When the data thread told of its arrival.
    pub(crate) arrived: Option<Time>,
    /// Its blocks have been given back.
    pub(crate) released: bool,
    /// When its process died.
    pub(crate) died: Option<Time>,
    /// The application asked for its end.
    pub(crate) ending: bool,
    /// A thread did not let go of its blocks: they are never given back.
    pub(crate) quarantined: bool,
    /// Whose bytes had arrived, once they had.
    pub(crate) came_from: BTreeSet<Serial>,
}

/// Which bytes a handle is about.
#[derive(Debug, Clone)]
pub(crate) enum Shape {
    Selection(Selection),
    Descriptors(Vec<BlockDescriptor>),
}

/// What kind of handle it is.
pub(crate) enum What {
    Offer(OfferRecord),
    Claim(ClaimRecord),
    Grant {
        name: GrantName,
        message: Option<Arc<[u8]>>,
    },
    ReadGrant {
        name: GrantName,
    },
    Push {
        grant: GrantName,
        message: Option<Arc<[u8]>>,
    },
    Pull {
        grant: GrantName,
    },
}

pub(crate) struct OfferRecord {
    pub(crate) request: usize,
    pub(crate) key: Vec<u8>,
    pub(crate) incarnation: Incarnation,
    pub(crate) attempt: u32,
    pub(crate) readers: u16,
    pub(crate) finished: bool,
    pub(crate) retracted: bool,
}

pub(crate) struct ClaimRecord {
    pub(crate) request: usize,
    pub(crate) key: Vec<u8>,
    pub(crate) set: u128,
    pub(crate) member: u16,
    /// The sources named, by incarnation.
    pub(crate) sources: Vec<Incarnation>,
    /// Attempts that the claim was told of: bytes of earlier ones never count.
    pub(crate) attempts_told: BTreeMap<Incarnation, u32>,
    pub(crate) pull: bool,
    pub(crate) filled: bool,
    /// A source named was dead already.
    pub(crate) stale_at_open: bool,
}

impl Record {
    pub(crate) fn is_open(&self) -> bool {
        self.ended.is_none() && self.died.is_none()
    }

    /// Whether its blocks may be read for sending.
    pub(crate) fn is_source(&self) -> bool {
        matches!(self.what, What::Offer(_) | What::Push { .. } | What::ReadGrant { .. })
    }

    pub(crate) fn kind(&self) -> &'static str {
        match self.what {
            What::Offer(_) => "offer",
            What::Claim(_) => "claim",
            What::Grant { .. } => "grant",
            What::ReadGrant { .. } => "read grant",
            What::Push { .. } => "push",
            What::Pull { .. } => "pull",
        }
    }

    pub(crate) fn succeeded(&self) -> bool {
        matches!(&self.ended, Some((_, Ok(_))))
    }
}

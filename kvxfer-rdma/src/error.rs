//! What can fail on a rail, with the verb or completion, the device, the peer and the rail.

use kvxfer_core::{Error, ErrorKind, Incarnation};

use crate::link::LinkCore;
use crate::verbs::{ErrorClass, Status, VerbsError};

/// What fails in this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaError {
    /// A verb failed.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// A work request completed with an error.
    #[error("a work request failed on {place}: {status:?} (vendor code {vendor:#x})")]
    Completion {
        /// The rail.
        place: String,
        /// How.
        status: Status,
        /// The device's own code.
        vendor: u32,
    },
    /// Nothing was completed for too long.
    #[error("no progress on {place} for {limit_ms} ms")]
    Stalled {
        /// The rail.
        place: String,
        /// The limit in milliseconds.
        limit_ms: u64,
    },
    /// A rail did not come up in time.
    #[error("{place} did not come up within {limit_ms} ms")]
    TimedOut {
        /// The rail.
        place: String,
        /// The limit in milliseconds.
        limit_ms: u64,
    },
    /// The port, device or peer took the rail away.
    #[error("{place}: {why}")]
    Lost {
        /// The rail.
        place: String,
        /// Why.
        why: String,
    },
    /// The peer broke the protocol.
    #[error("the peer {peer} broke the rdma link's protocol: {why}")]
    Peer {
        /// Who.
        peer: Incarnation,
        /// How.
        why: String,
    },
    /// The link or the transport is closed.
    #[error("the link to {peer} is closed")]
    Closed {
        /// The peer.
        peer: Incarnation,
    },
}

impl RdmaError {
    pub(crate) fn peer(link: &LinkCore, why: String) -> RdmaError {
        RdmaError::Peer {
            peer: link.peer.incarnation,
            why,
        }
    }
}

impl From<RdmaError> for Error {
    fn from(error: RdmaError) -> Error {
        let rail_lost = |place: String, why: String, remedy: &str| {
            Error::new(ErrorKind::Transport, "a rail was lost")
                .at(place)
                .because(why)
                .remedy(remedy)
        };
        match error {
            RdmaError::Verbs(error) => error.into(),
            RdmaError::Completion { place, status, vendor } => {
                let (kind, remedy) = match status.class() {
                    ErrorClass::LocalBug => (
                        ErrorKind::Internal,
                        "report it: the work request did not fit this side's memory or queue pair",
                    ),
                    ErrorClass::RemoteAccess => (
                        ErrorKind::Protocol,
                        "the peer's pool was closed or its keys are stale: check that both ends saw the same registration",
                    ),
                    _ => (
                        ErrorKind::Transport,
                        "nothing if the rail comes back by itself; else check the fabric and whether the peer lives",
                    ),
                };
                Error::new(kind, "a rail was lost")
                    .at(place)
                    .because(format!(
                        "a work request completed with {status:?} (vendor code {vendor:#x})"
                    ))
                    .remedy(remedy)
            }
            RdmaError::Stalled { place, limit_ms } => rail_lost(
                place,
                format!("nothing was completed for {limit_ms} ms"),
                "nothing if the rail comes back by itself; else check the fabric and whether the peer lives",
            ),
            RdmaError::TimedOut { place, limit_ms } => rail_lost(
                place,
                format!("it did not come up within {limit_ms} ms"),
                "check that the two ports are on one network, and that its MTU holds on the whole path",
            ),
            RdmaError::Lost { place, why } => rail_lost(place, why, "nothing if the rail comes back by itself"),
            RdmaError::Peer { peer, why } => Error::new(ErrorKind::Protocol, "the rdma link")
                .at(format!("peer {peer}"))
                .because(why)
                .remedy("run the same version of kvxfer on both sides; report it if they are"),
            RdmaError::Closed { peer } => Error::new(ErrorKind::Closed, "the link")
                .at(format!("rdma to {peer}"))
                .because("it is closed")
                .remedy("open a new session with the peer"),
        }
    }
}

//! A connection that a session is made over, and how far it is.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use crate::id::{Incarnation, PoolId};
use crate::time::Time;
use crate::wire::Hello;

/// A session connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stage: Stage,
    pub(super) purpose: Purpose,
    /// Where an accepted one came from.
    pub(super) from: Option<SocketAddr>,
    /// Who is at the other end, or should be.
    pub(super) peer: Option<Incarnation>,
    /// The dialer's lane secret.
    pub(super) token: u128,
    /// What the other end said of itself.
    pub(super) hello: Option<Box<Hello>>,
    /// What this end said when it accepted.
    pub(super) resumed: bool,
    /// The pools that this end's hello has named: what came or went since is told when the session begins.
    pub(super) pools_said: BTreeSet<PoolId>,
    pub(super) began: Time,
}

/// How far a connection's handshake is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Dialing,
    /// The other end's hello is awaited.
    Hello,
    /// Its word that it is ready is awaited.
    Ready,
    /// Accepted while our own was being dialed: kept in case that fails.
    Parked,
    Established,
}

/// Why there is a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Peer(Incarnation),
    Resolve(SocketAddr),
    Accepted,
}

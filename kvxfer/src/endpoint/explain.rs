//! Connecting ahead of time, and explaining the path to a peer.

use std::fmt::Write as _;
use std::time::Duration;

use kvxfer_core::wire::EndpointAddress;
use kvxfer_core::{Error, ErrorKind, Incarnation, Result};

use crate::clock;
use crate::control::{PeerState, Shared};

use super::Endpoint;

impl Endpoint {
    /// Makes the session and the link to a peer ahead of the first transfer, and waits for them at most `timeout`.
    /// Idempotent, and coalesced with whatever else connects.
    ///
    /// # Errors
    /// `Unreachable` if nobody answers, `StalePeer` if somebody else does, and why the handshake was refused.
    pub fn connect(&self, address: &EndpointAddress, timeout: Duration) -> Result<()> {
        let shared = &self.shared;
        let wanted = address.clone();
        shared.begin(|state, now| state.machine.connect(now, &wanted))?;
        let mut found = None;
        let up = shared.wait_for(timeout, |state| {
            found = match_peer(state, address);
            match found {
                Some(peer) => Shared::link_is_up(state, peer),
                None => false,
            }
        });
        if up {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Unreachable, "no session").at(address.to_string()))
    }

    /// The path to a peer in words: session, transport, rails, and why better ones were not taken.
    pub fn explain(&self, address: &EndpointAddress) -> String {
        let shared = &self.shared;
        let mut text = format!("from {} ({}) to {address}\n", shared.name, shared.incarnation);
        let _ = writeln!(text, "transports here: {}", shared.transports.names().join(", "));
        for (name, why) in &shared.transports.refused {
            let _ = writeln!(text, "  not {name}: {why}");
        }
        text
    }
}

//! Connecting ahead of time, and explaining the path to a peer.

use std::fmt::Write as _;
use std::time::Duration;

use kvxfer_core::wire::EndpointAddress;
use kvxfer_core::{Error, ErrorKind, Incarnation, Result};

use crate::clock;
use crate::control::{PeerState, Shared, State};

use super::Endpoint;

impl Endpoint {
    /// Makes the session and the link to a peer ahead of the first transfer, and waits for them at most `timeout`.
    /// Idempotent, and coalesced with whatever else connects.
    ///
    /// # Errors
    /// `Unreachable` if nobody answers, `StalePeer` if somebody else does, and why the handshake was refused;
    /// `Transport` (or `Unsupported`) if the peer answers and no transport that both sides have comes up.
    pub fn connect(&self, address: &EndpointAddress, timeout: Duration) -> Result<()> {
        let shared = &self.shared;
        shared.begin(|state, now| {
            // What it was lost for before has nothing to say about this attempt.
            if let Some(peer) = find(state, address)
                && matches!(state.peers.get(&peer).map(|peer| &peer.state), Some(PeerState::Lost(_)))
            {
                state.peers.remove(&peer);
            }
            state.machine.connect(now, address)
        })?;
        let mut outcome = None;
        let mut session = false;
        shared.wait_for(timeout, |state| {
            outcome = find(state, address).and_then(|peer| match &state.peers.get(&peer)?.state {
                PeerState::Lost(error) => Some(Err(error.clone())),
                _ if Shared::link_is_up(state, peer) => Some(Ok(())),
                _ => state.machine.why_no_link(peer).map(Err),
            });
            session = find(state, address)
                .and_then(|peer| state.peers.get(&peer))
                .is_some_and(|peer| matches!(peer.state, PeerState::Ready | PeerState::Draining));
            outcome.is_some()
        });
        outcome.unwrap_or_else(|| {
            if session {
                return Err(Error::new(ErrorKind::Transport, "no link yet")
                    .at(address.to_string())
                    .because(format!(
                        "there is a session, and no transport came up within {timeout:?}"
                    ))
                    .remedy("see `explain` for the transports, or allow more time"));
            }
            Err(Error::new(ErrorKind::Unreachable, "no session yet")
                .at(address.to_string())
                .because(format!("the peer did not answer within {timeout:?}"))
                .remedy("check that the peer runs and that the address is its published one"))
        })
    }

    /// The path to a peer in words: session, transport, rails, and why better ones were not taken.
    pub fn explain(&self, address: &EndpointAddress) -> String {
        let shared = &self.shared;
        let mut text = format!("from {} ({}) to {address}\n", shared.name, shared.incarnation);
        // Writing to a String cannot fail.
        let _ = writeln!(text, "transports here: {}", shared.transports.names().join(", "));
        for (name, why) in &shared.transports.refused {
            let _ = writeln!(text, "  not {name}: {why}");
        }
        if let Some(cuda) = shared.loaded_cuda() {
            let facts = cuda.facts().to_string();
            let notes = cuda.notes();
            for line in facts.lines().chain(notes.iter().map(String::as_str)) {
                let _ = writeln!(text, "cuda {}", line.trim_start());
            }
        }
        let security = &shared.config.security;
        let _ = writeln!(
            text,
            "security: {}, off loopback {}",
            security.mode, security.off_loopback
        );
        let (peer, lines) = shared.look(|state| {
            let peer = find(state, address);
            let known = peer.and_then(|peer| state.peers.get(&peer).cloned());
            let lines = peer.map(|peer| state.machine.explain(peer)).unwrap_or_default();
            (peer.zip(known), lines)
        });
        let Some((incarnation, known)) = peer else {
            text.push_str("no session: nothing was sent to this peer yet, and nothing came from it\n");
            return text;
        };
        let since = clock::now().since(known.since);
        let state = match &known.state {
            PeerState::Ready => "ready".to_owned(),
            PeerState::Interrupted { why } => format!("interrupted ({why})"),
            PeerState::Draining => "draining".to_owned(),
            PeerState::Lost(error) => format!("lost ({error})"),
        };
        let _ = writeln!(text, "peer {} ({incarnation}): {state} for {since:.1?}", known.name);
        match shared.path(incarnation) {
            Some(path) => {
                let _ = writeln!(
                    text,
                    "path: {}, {} of {} rails up",
                    path.transport,
                    path.rails.len(),
                    path.rails_configured
                );
                for rail in &path.rails {
                    let _ = writeln!(text, "  {rail}");
                }
                for why in &path.rails_down {
                    let _ = writeln!(text, "  not up: {why}");
                }
                for note in &path.notes {
                    let _ = writeln!(text, "  {note}");
                }
            }
            None => text.push_str("path: none\n"),
        }
        for (name, why) in &known.refused {
            let _ = writeln!(text, "  not {name}: {why}");
        }
        for line in lines {
            let _ = writeln!(text, "{line}");
        }
        text
    }
}

/// The peer that an address means. A bare socket address means whoever listens there.
fn find(state: &State, address: &EndpointAddress) -> Option<Incarnation> {
    if let Some(incarnation) = address.incarnation {
        return Some(incarnation);
    }
    let here = |peer: &&Incarnation| {
        state.peers.get(*peer).is_some_and(|known| {
            known
                .address
                .as_ref()
                .is_some_and(|listens| address.sockets.iter().any(|socket| listens.sockets.contains(socket)))
        })
    };
    // The living before the lost: a restarted peer listens where its predecessor did.
    let mut found: Vec<&Incarnation> = state.peers.keys().filter(here).collect();
    found.sort_by_key(|peer| matches!(state.peers[*peer].state, PeerState::Lost(_)));
    found.first().map(|peer| **peer)
}

//! What peers say on a session, to whom it goes.

use super::claim::ReadyPart;
use super::peers::PeerPool;
use super::types::{Action, PeerChange};
use super::{Machine, UseOwner};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{GrantName, Incarnation};
use crate::time::Time;
use crate::wire::{Message, Verdict};

/// Pools of one peer, at most.
const PEER_POOLS_MAX: usize = 4096;

impl Machine {
    /// Takes one message, in order. An error closes the session.
    pub(super) fn message(&mut self, now: Time, from: Incarnation, message: Message) -> Result<()> {
        match message {
            Message::Heartbeat => {}
            Message::PoolAdded(advert) => {
                let Some(peer) = self.peers.get_mut(&from) else {
                    return Ok(());
                };
                if peer.pools.len() >= PEER_POOLS_MAX {
                    return Err(Error::new(ErrorKind::Protocol, "one more pool")
                        .because(format!("a peer has at most {PEER_POOLS_MAX}")));
                }
                peer.pools_told = peer.pools_told.max(Some(advert.id));
                peer.pools.insert(advert.id, PeerPool::of(advert));
                self.start_transfers(now, from);
            }
            Message::PoolRemoved(pool) => {
                if let Some(peer) = self.peers.get_mut(&from) {
                    peer.pools.remove(&pool);
                }
            }
            Message::Claim(claim) => self.remote_claim(now, from, claim)?,
            Message::Matched { claim, attempt, pool } => self.claim_matched(now, from, claim, attempt, pool)?,
            Message::ClaimRefused { claim, error } | Message::SourceEnded { claim, error } => {
                self.claim_ended_by_source(now, from, claim, error)?;
            }
            Message::ClaimGrant { claim, attempt, grant } => {
                self.member_granted(now, from, claim, attempt, grant, false)?;
            }
            Message::ClaimPull { claim, attempt, grant } => {
                self.member_granted(now, from, claim, attempt, grant, true)?;
            }
            // The member stays until its claim ends, so that both sides give the same verdict.
            Message::ClaimNothing { .. } => {}
            Message::ClaimEnded { claim, verdict } => self.claim_ended(now, from, claim, verdict),
            Message::ClaimEndedAck { claim } => self.claim_end_acknowledged(now, from, claim),
            Message::Restarted { claim, attempt } => self.claim_restarted(now, from, claim, attempt)?,
            Message::PartReady {
                claim,
                attempt,
                part,
                extent,
                source,
            } => {
                let ready = ReadyPart {
                    attempt,
                    part,
                    extent,
                    source,
                };
                self.part_ready(now, from, claim, ready)?;
            }
            Message::ReadPart { claim, attempt, part } => self.read_part(now, from, claim, attempt, part)?,
            Message::Read { read, grant, into } => self.read_requested(now, from, read, grant, into)?,
            Message::ReadRefused { read, error } => self.read_refused(now, from, read, error),
            Message::Validate { id, claim, attempt } if claim => self.validate_member(now, from, id, attempt),
            Message::Validate { id, .. } => self.validate_read(now, from, id),
            Message::Validated { id, claim, live } if claim => self.claim_validated(now, from, id, live)?,
            Message::Validated { id, live, .. } => self.pull_validated(now, from, id, live),
            Message::GrantEnded { grant, error } => self.sender_stopped(now, from, grant, error),
            Message::Ask { grant } => self.asked(now, from, grant),
            Message::Verdict { grant, verdict } => self.verdict(now, from, grant, verdict),
            Message::VerdictAck { grants } => {
                for grant in grants {
                    if grant.incarnation == self.incarnation {
                        self.slot_acknowledged(now, from, (grant.slot, grant.generation));
                    }
                }
            }
            Message::FenceLane { lane, chunks } => self.fence_lane(from, lane, chunks)?,
            Message::LaneFenced { lane, chunks } => self.lane_fenced(from, lane, chunks),
            Message::Link { transport, body } => self.link_message(from, transport, body)?,
            Message::TransportFailed { transport, error } => self.peer_transport_failed(now, from, &transport, &error),
            Message::ReadDirect { read, grant } => self.read_direct_requested(now, from, read, grant),
            Message::Draining => {
                if let Some(peer) = self.peers.get_mut(&from) {
                    peer.draining = true;
                    self.actions.push_back(Action::Peer {
                        peer: from,
                        change: PeerChange::Draining,
                    });
                }
            }
            Message::Goodbye => {
                let name = self.peers.get(&from).map(|peer| peer.name.clone()).unwrap_or_default();
                let error = super::peers::lost(from, &name, "it was closed");
                self.end_peer(now, from, error);
            }
        }
        Ok(())
    }

    /// The owner of a grant's destination says what became of it.
    fn verdict(&mut self, now: Time, from: Incarnation, grant: GrantName, verdict: Verdict) {
        if grant.incarnation == self.incarnation {
            // A read grant of ours: the reader owns the destination.
            self.serve_ended(now, from, grant, verdict);
            return;
        }
        match self.uses.get(&grant) {
            Some(&UseOwner::Push(handle)) if grant.incarnation == from => self.push_verdict(now, handle, verdict),
            Some(&UseOwner::Member(peer, claim)) if peer == from => {
                self.member_ended(now, peer, claim, verdict);
                self.acknowledge_verdict(now, from, grant);
            }
            _ => self.acknowledge_verdict(now, from, grant),
        }
    }
}

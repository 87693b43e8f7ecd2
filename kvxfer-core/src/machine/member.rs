//! Claims of peers: waiting for their offer, or served by it as its members.

use super::keys::EarlyEnd;
use super::member_grant::MemberGrant;
use super::timers::TimerKey;
use super::types::{Action, HandleId, MemberVerdict, Notice};
use super::{Machine, UseOwner};
use crate::error::{Error, ErrorKind, Result};
use crate::flow::TransferId;
use crate::id::{GrantName, Incarnation};
use crate::mutants::{self, Mutant};
use crate::time::Time;
use crate::wire::{ClaimMessage, Message, Verdict};

/// A claim of a peer, by the peer and its number there.
#[derive(Debug)]
pub(super) enum RemoteClaim {
    /// No offer yet, under this key.
    Waiting(Vec<u8>),
    /// Served by an offer.
    Member(Box<Member>),
}

/// A claim that has met its offer.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) offer: HandleId,
    set: u128,
    member: u16,
    pub(super) pull: bool,
    pub(super) grant: Option<MemberGrant>,
    /// The last grant of any attempt: what is asked about when the session is lost.
    pub(super) last_grant: Option<GrantName>,
    /// All bytes of some attempt were given to the link (push), or said to be good (pull).
    pub(super) may_have_arrived: bool,
    /// The session on which it would be told was lost; the next one was asked.
    asking: bool,
    /// The destination was told that the source ends it.
    pub(super) source_ended: bool,
}

impl Member {
    pub(super) fn may_have_arrived(&self) -> bool {
        self.may_have_arrived
    }
}

impl Machine {
    /// A peer's claim came.
    pub(super) fn remote_claim(&mut self, now: Time, peer: Incarnation, claim: ClaimMessage) -> Result<()> {
        if self.remote_claims.contains_key(&(peer, claim.claim)) {
            return Err(protocol("a second claim with the same number"));
        }
        super::claim::check_key(&claim.key).map_err(|_| protocol("a claim with an impossible key"))?;
        if claim.members == 0 || claim.member >= claim.members {
            return Err(protocol("a claim with an impossible member number"));
        }
        let number = claim.claim;
        if let Some(&offer) = self.live_keys.get(&claim.key) {
            match self.offers.get(&offer).and_then(|offer| offer.refusal()) {
                Some(error) => self.refuse_claim(now, peer, number, error),
                None => self.match_claim(now, offer, peer, claim),
            }
            return Ok(());
        }
        let refusal = if let Some(error) = self.keys.refusal(now, &claim.key) {
            Some(error.clone())
        } else if self.draining {
            Some(
                Error::new(ErrorKind::NotOffered, "the key")
                    .because("the endpoint is draining: it makes no new offers")
                    .remedy("claim from another replica"),
            )
        } else {
            None
        };
        if let Some(error) = refusal {
            self.refuse_claim(now, peer, number, error);
            return Ok(());
        }
        let (key, until) = (
            claim.key.clone(),
            now + std::time::Duration::from_millis(claim.remaining_ms),
        );
        if !self.keys.wait(peer, claim) {
            let error = Error::new(ErrorKind::Busy, "one more claim that waits for its offer")
                .because(format!("{} wait", self.keys.waiting()))
                .remedy("retry, or raise limits.waiting_claims_max");
            self.refuse_claim(now, peer, number, error);
            return Ok(());
        }
        self.remote_claims.insert((peer, number), RemoteClaim::Waiting(key));
        self.timers.set(TimerKey::Waiting(peer, number), until);
        Ok(())
    }

    fn refuse_claim(&mut self, now: Time, peer: Incarnation, claim: u64, error: Error) {
        self.send(now, peer, Message::ClaimRefused { claim, error });
    }

    /// A claim meets its offer.
    pub(super) fn match_claim(&mut self, now: Time, id: HandleId, peer: Incarnation, claim: ClaimMessage) {
        let Some(offer) = self.offers.get_mut(&id) else { return };
        let admitted = match offer.refusal() {
            Some(error) => Err(error),
            None => offer.admit(claim.set, claim.member, claim.members),
        };
        if let Err(error) = admitted {
            self.refuse_claim(now, peer, claim.claim, error);
            return;
        }
        let key = (peer, claim.claim);
        offer.live.insert(key);
        offer.matched = true;
        offer.since = now;
        let (attempt, pool) = (offer.attempt, offer.pool);
        let member = Member {
            offer: id,
            set: claim.set,
            member: claim.member,
            pull: claim.pull,
            grant: None,
            last_grant: None,
            may_have_arrived: false,
            asking: false,
            source_ended: false,
        };
        self.remote_claims.insert(key, RemoteClaim::Member(Box::new(member)));
        self.send(
            now,
            peer,
            Message::Matched {
                claim: claim.claim,
                attempt,
                pool,
            },
        );
        self.actions.push_back(Action::Notice {
            handle: id,
            notice: Notice::Matched,
        });
    }

    /// A waiting claim has expired: its owner knows by itself, and hears nothing more.
    pub(super) fn on_waiting_timer(&mut self, peer: Incarnation, claim: u64) {
        if let Some(RemoteClaim::Waiting(key)) = self.remote_claims.get(&(peer, claim)) {
            self.keys.stop_waiting(key, peer, claim);
            self.remote_claims.remove(&(peer, claim));
        }
    }

    pub(super) fn member(&mut self, peer: Incarnation, claim: u64) -> Option<&mut Member> {
        match self.remote_claims.get_mut(&(peer, claim)) {
            Some(RemoteClaim::Member(member)) => Some(member),
            _ => None,
        }
    }

    // ------------------------------------------------------------------------------------------- restarting

    pub(super) fn restart_member(&mut self, now: Time, peer: Incarnation, claim: u64, attempt: u32) {
        let Some(member) = self.member(peer, claim).filter(|member| !member.source_ended) else {
            return;
        };
        if let Some(grant) = member.grant.take() {
            self.uses.remove(&grant.name);
            match grant.transfer {
                Some(transfer) => self.stop_transfer(now, transfer, Some(grant.name)),
                None => self.acknowledge_verdict(now, peer, grant.name),
            }
        }
        self.send(now, peer, Message::Restarted { claim, attempt });
    }

    // ---------------------------------------------------------------------------------------------- its end

    /// The link is done with a member's transfer; the verdict comes from the destination.
    pub(super) fn member_transfer_over(&mut self, peer: Incarnation, claim: u64, transfer: TransferId) {
        if let Some(grant) = self.member(peer, claim).and_then(|member| member.grant.as_mut())
            && grant.transfer == Some(transfer)
        {
            grant.transfer = None;
        }
    }

    /// The source ends a member: tells the destination, which decides.
    pub(super) fn end_member_from_source(&mut self, now: Time, peer: Incarnation, claim: u64, error: Error) {
        let Some(member) = self.member(peer, claim).filter(|member| !member.source_ended) else {
            return;
        };
        member.source_ended = true;
        let transfer = member.grant.as_mut().and_then(|grant| {
            grant.announced.clear();
            grant.transfer
        });
        self.send(now, peer, Message::SourceEnded { claim, error });
        if let Some(transfer) = transfer {
            self.stop_transfer(now, transfer, None);
        }
    }

    /// The destination says how a claim has ended.
    pub(super) fn claim_ended(&mut self, now: Time, peer: Incarnation, claim: u64, verdict: Verdict) {
        match self.remote_claims.get(&(peer, claim)) {
            None => {}
            Some(RemoteClaim::Waiting(key)) => {
                let key = key.clone();
                self.remote_claims.remove(&(peer, claim));
                self.timers.clear(TimerKey::Waiting(peer, claim));
                if let Some(waiting) = self.keys.stop_waiting(&key, peer, claim) {
                    let end = EarlyEnd {
                        peer,
                        set: waiting.claim.set,
                        member: waiting.claim.member,
                        members: waiting.claim.members,
                        verdict,
                    };
                    self.keys.ended_early(now, &key, end);
                    self.timers
                        .set_earlier(TimerKey::Keys, now + self.config.ended_keys_retention);
                }
            }
            Some(RemoteClaim::Member(_)) => self.member_ended(now, peer, claim, verdict),
        }
        self.send(now, peer, Message::ClaimEndedAck { claim });
    }

    /// A member has ended, and its offer is looked at.
    pub(super) fn member_ended(&mut self, now: Time, peer: Incarnation, claim: u64, verdict: Verdict) {
        if let Some((offer, verdict)) = self.take_member(now, peer, claim, verdict) {
            self.note_member_end(now, offer, (peer, claim), verdict);
        }
    }

    /// A member has ended; its offer looks at that itself.
    pub(super) fn end_member(&mut self, now: Time, peer: Incarnation, claim: u64, verdict: Verdict) {
        let key = (peer, claim);
        if let Some((offer, verdict)) = self.take_member(now, peer, claim, verdict)
            && let Some(offer) = self.offers.get_mut(&offer)
        {
            offer.live.remove(&key);
            offer.end_member_of(verdict);
        }
    }

    fn take_member(
        &mut self,
        now: Time,
        peer: Incarnation,
        claim: u64,
        verdict: Verdict,
    ) -> Option<(HandleId, MemberVerdict)> {
        if !matches!(self.remote_claims.get(&(peer, claim)), Some(RemoteClaim::Member(_))) {
            return None;
        }
        let Some(RemoteClaim::Member(member)) = self.remote_claims.remove(&(peer, claim)) else {
            return None;
        };
        if let Some(grant) = member.grant {
            self.uses.remove(&grant.name);
            if let Some(transfer) = grant.transfer {
                self.stop_transfer(now, transfer, None);
            }
        }
        if let Some(asked) = member.last_grant {
            self.uses.remove(&asked);
        }
        let verdict = MemberVerdict {
            peer,
            set: member.set,
            member: member.member,
            verdict,
        };
        Some((member.offer, verdict))
    }

    /// A peer is lost: what its claims have come to is known only where nothing can have arrived.
    pub(super) fn remote_claims_lost(&mut self, now: Time, peer: Incarnation, error: &Error, replaced: bool) {
        let claims: Vec<u64> = self
            .remote_claims
            .range((peer, 0)..=(peer, u64::MAX))
            .map(|((_, claim), _)| *claim)
            .collect();
        for claim in claims {
            let verdict = match self.remote_claims.get(&(peer, claim)) {
                Some(RemoteClaim::Waiting(key)) => {
                    self.keys.stop_waiting(key, peer, claim);
                    self.remote_claims.remove(&(peer, claim));
                    self.timers.clear(TimerKey::Waiting(peer, claim));
                    continue;
                }
                Some(RemoteClaim::Member(member)) if replaced && member.asking => {
                    // Its transfer dies with the link; the verdict is asked for.
                    if let Some(grant) = self.member(peer, claim).and_then(|member| member.grant.as_mut()) {
                        grant.transfer = None;
                    }
                    continue;
                }
                Some(RemoteClaim::Member(member))
                    if member.may_have_arrived && !mutants::is(Mutant::SayLostForUnknown) =>
                {
                    Verdict::Unknown
                }
                _ => Verdict::Failed(error.clone()),
            };
            self.member_ended(now, peer, claim, verdict);
        }
    }

    /// The peer has lost the session but lives: members whose outcome is open, to be asked for in the next session.
    pub(super) fn ask_for_members(&mut self, peer: Incarnation) -> Vec<Message> {
        let mut asks = Vec::new();
        for ((_, claim), remote) in self.remote_claims.range_mut((peer, 0)..=(peer, u64::MAX)) {
            if let RemoteClaim::Member(member) = remote
                && member.may_have_arrived
                && let Some(grant) = member.last_grant
            {
                member.asking = true;
                self.uses.insert(grant, UseOwner::Member(peer, *claim));
                asks.push(Message::Ask { grant });
            }
        }
        asks
    }
}

pub(super) fn protocol(what: &str) -> Error {
    Error::new(ErrorKind::Protocol, what)
}

//! How offers end: by their deadline, when all were served, or early; and behind which fence.

use super::Machine;
use super::member::RemoteClaim;
use super::offer::already_claimed;
use super::slots::{quarantined, unknown};
use super::timers::TimerKey;
use super::types::{HandleId, MemberVerdict, Outcome};
use crate::error::{Error, ErrorKind};
use crate::id::Incarnation;
use crate::mutants::{self, Mutant};
use crate::time::Time;
use crate::wire::Verdict;

#[derive(Debug)]
pub(super) struct OfferEnd {
    /// `None` if all its readers were served.
    pub(super) why: Option<Error>,
}

impl Machine {
    pub(super) fn on_offer_deadline(&mut self, now: Time, id: HandleId) {
        let (unmatched, hold_limit) = (self.config.unmatched_deadline, self.config.hold_max);
        let Some(offer) = self.offers.get(&id).filter(|offer| offer.ending.is_none()) else {
            return;
        };
        if offer.strict.is_none() && !offer.live.is_empty() && now < offer.hold {
            let at = (now + unmatched).min(offer.hold);
            self.timers.set(TimerKey::Deadline(id), at);
            return;
        }
        let error = if !offer.matched {
            Error::new(ErrorKind::Unclaimed, "the offer")
                .because("no claim came before its deadline")
                .remedy("check that the decode side was given this endpoint's address and the key")
        } else {
            Error::new(ErrorKind::DeadlineExceeded, "the offer")
                .because(format!("it waited for: {}", offer.waits_for()))
                .remedy(format!(
                    "allow more time (an offer with open claims lives at most {} s)",
                    hold_limit.as_secs()
                ))
        };
        self.end_offer(now, id, error);
    }

    /// Ends an offer early: nothing of its blocks is read any more. The destinations decide what became of theirs.
    pub(super) fn end_offer(&mut self, now: Time, id: HandleId, error: Error) {
        let Some(offer) = self.offers.get(&id).filter(|offer| offer.ending.is_none()) else {
            return;
        };
        let members: Vec<(Incarnation, u64)> = offer.live.iter().copied().collect();
        self.begin_offer_end(now, id, Some(error.clone()));
        for (peer, claim) in members {
            self.end_member_from_source(now, peer, claim, error.clone());
        }
        self.fences_changed = true;
    }

    fn begin_offer_end(&mut self, now: Time, id: HandleId, why: Option<Error>) {
        let Some(offer) = self.offers.get(&id) else { return };
        let limit = self.fence_limit(offer.live.iter().map(|(peer, _)| *peer));
        let Some(offer) = self.offers.get_mut(&id) else { return };
        let retracted = why.as_ref().is_some_and(|why| why.kind() == ErrorKind::Retracted);
        if !(retracted && mutants::is(Mutant::RetractWithoutGate)) {
            offer.gate.close();
        }
        offer.ending = Some(OfferEnd { why });
        offer.since = now;
        self.forget_withheld(id);
        self.fencing.insert(id);
        self.timers.clear(TimerKey::Deadline(id));
        self.timers.set(TimerKey::Fence(id), now + limit);
    }

    /// Looks whether the offer has ended, or can.
    pub(super) fn check_offer(&mut self, now: Time, id: HandleId) {
        let Some(offer) = self.offers.get(&id) else { return };
        if offer.ending.is_none() {
            if !offer.is_served() {
                return;
            }
            self.begin_offer_end(now, id, None);
        }
        let Some(offer) = self.offers.get(&id) else { return };
        let early = mutants::is(Mutant::ReleaseOfferEarly);
        let unguarded = mutants::is(Mutant::RetractWithoutGate);
        let fenced = unguarded || (offer.gate.fenced() && offer.voided.iter().all(|gate| gate.fenced()));
        if fenced && (offer.live.is_empty() || early) {
            self.finish_offer(now, id, false);
        }
    }

    /// Its fence, or the destinations' answers, took too long.
    pub(super) fn offer_not_fenced(&mut self, now: Time, id: HandleId) {
        let Some(offer) = self.offers.get_mut(&id) else { return };
        if offer.ending.is_none() {
            return;
        }
        let silent: Vec<(Incarnation, u64)> = offer.live.iter().copied().collect();
        for (peer, claim) in silent {
            let verdict = match self.remote_claims.get(&(peer, claim)) {
                Some(RemoteClaim::Member(member)) if member.may_have_arrived() => Verdict::Unknown,
                _ => {
                    let why = Error::new(ErrorKind::Cancelled, "the claim")
                        .because("its source ended it before all bytes were sent");
                    Verdict::Failed(why)
                }
            };
            self.end_member(now, peer, claim, verdict);
        }
        let Some(offer) = self.offers.get(&id) else { return };
        let fenced = offer.gate.fenced() && offer.voided.iter().all(|gate| gate.fenced());
        self.finish_offer(now, id, !fenced);
    }

    fn finish_offer(&mut self, now: Time, id: HandleId, hung: bool) {
        let Some(offer) = self.offers.remove(&id) else { return };
        self.live_keys.remove(&offer.key);
        self.fencing.remove(&id);
        self.timers.clear(TimerKey::Fence(id));
        self.timers.clear(TimerKey::Deadline(id));
        for member in &offer.live {
            // Only a defect on purpose ends an offer with live members.
            self.remote_claims.remove(member);
        }
        let why = offer.ending.and_then(|end| end.why);
        self.keys.ended(now, &offer.key, late_claim_error(why.as_ref()));
        self.timers
            .set_earlier(TimerKey::Keys, now + self.config.ended_keys_retention);
        let arrived = offer.verdicts.iter().any(|member| member.verdict == Verdict::Arrived);
        let undecided = offer.verdicts.iter().find(|member| member.verdict == Verdict::Unknown);
        // Another error than `Unknown` says that nobody got anything.
        let result = match (why, undecided) {
            _ if arrived => Ok(Outcome::Released {
                members: offer.verdicts,
            }),
            (_, Some(member)) => Err(unknown(
                format!("the claim of endpoint {}", member.peer),
                "all its bytes were sent, and its endpoint did not say what became of them",
            )),
            (Some(why), None) => Err(why),
            (None, None) => Err(first_failure(&offer.verdicts)),
        };
        let result = match result {
            _ if hung => {
                self.sources_quarantined += 1;
                self.quarantined_pools.insert(offer.pool);
                let error = result.err().unwrap_or_else(|| {
                    Error::new(ErrorKind::Internal, "the source blocks")
                        .because("a data thread or device did not let go of them")
                });
                Err(quarantined(&error))
            }
            other => other,
        };
        self.complete(id, result);
    }

    /// A member of an offer has ended.
    pub(super) fn note_member_end(&mut self, now: Time, id: HandleId, key: (Incarnation, u64), verdict: MemberVerdict) {
        let Some(offer) = self.offers.get_mut(&id) else { return };
        offer.live.remove(&key);
        offer.end_member_of(verdict);
        offer.since = now;
        self.check_offer(now, id);
    }
}

/// What a claim is told that comes after its offer has ended in this way.
pub(super) fn late_claim_error(why: Option<&Error>) -> Error {
    match why {
        None => already_claimed("all its readers were served".to_string()),
        Some(why) if matches!(why.kind(), ErrorKind::Retracted | ErrorKind::Cancelled) => why.clone(),
        Some(why) => Error::new(ErrorKind::NotOffered, "the key")
            .because(format!("its offer has ended: {why}"))
            .remedy("offer it again"),
    }
}

fn first_failure(verdicts: &[MemberVerdict]) -> Error {
    match verdicts.first().map(|member| &member.verdict) {
        Some(Verdict::Failed(error)) => error.clone(),
        _ => Error::new(ErrorKind::Internal, "an offer without members"),
    }
}

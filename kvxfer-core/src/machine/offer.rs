//! Offers of this endpoint: blocks appended, parts released, claim sets served, and how that ends.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Machine;
use super::claim::check_key;
use super::offer_end::{OfferEnd, late_claim_error};
use super::released::{PartRange, Released};
use super::timers::TimerKey;
use super::types::{EventId, HandleId, MemberVerdict, OfferOptions};
use super::withheld::Withheld;
use crate::error::{Error, ErrorKind, Result};
use crate::flow::Gate;
use crate::id::{Incarnation, PoolId};
use crate::layout::{BlockId, Selection};
use crate::mutants::{self, Mutant};
use crate::plan::{Scope, Target};
use crate::time::Time;

/// An open offer.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) key: Vec<u8>,
    pub(super) pool: PoolId,
    pub(super) options: OfferOptions,
    pub(super) attempt: u32,
    /// The fence around every read of its blocks, one for each attempt.
    pub(super) gate: Arc<Gate>,
    /// Gates of earlier attempts that are not fenced yet.
    pub(super) voided: Vec<Arc<Gate>>,
    /// The blocks appended so far, as a target, for the streams.
    pub(super) source: Arc<Target>,
    /// What may be sent.
    pub(super) released: Released,
    /// That, and what is withheld: each token of a layer is in it once.
    reserved: Released,
    /// Released by its owner, and not to be sent before something has happened.
    pub(super) withheld: Withheld,
    pub(super) finished: Option<u32>,
    parts: u32,
    /// When it ends by itself, if its caller said so.
    pub(super) strict: Option<Time>,
    pub(super) hold: Time,
    pub(super) sets: BTreeMap<u128, ClaimSet>,
    /// Members that have not ended.
    pub(super) live: BTreeSet<(Incarnation, u64)>,
    pub(super) verdicts: Vec<MemberVerdict>,
    pub(super) matched: bool,
    pub(super) ending: Option<OfferEnd>,
    pub(super) since: Time,
}

/// One reader: its claims come from `members` endpoints.
#[derive(Debug)]
pub(super) struct ClaimSet {
    pub(super) members: u16,
    pub(super) seen: BTreeSet<u16>,
    ended: u16,
}

impl Offer {
    /// Why it takes no more claims, if it ends.
    pub(super) fn refusal(&self) -> Option<Error> {
        self.ending.as_ref().map(|end| late_claim_error(end.why.as_ref()))
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// All readers have come, and all their members have ended.
    pub(super) fn is_served(&self) -> bool {
        let all_ended = |set: &ClaimSet| set.ended == set.members;
        if mutants::is(Mutant::ReleaseOfferEarly) {
            return !self.verdicts.is_empty();
        }
        self.sets.len() >= usize::from(self.options.readers) && self.sets.values().all(all_ended)
    }

    pub(super) fn waits_for(&self) -> &'static str {
        if self.ending.is_some() {
            "fence"
        } else if self.live.is_empty() {
            "claim"
        } else if !self.withheld.is_empty() {
            "event"
        } else if self.finished.is_none() {
            "parts"
        } else {
            "verdict"
        }
    }

    fn selection(&self) -> &Selection {
        match &*self.source {
            Target::Selection { selection, .. } => selection,
            Target::Descriptors(_) => &EMPTY,
        }
    }
}

static EMPTY: Selection = Selection { groups: Vec::new() };

impl Machine {
    pub(super) fn begin_offer(
        &mut self,
        now: Time,
        key: &[u8],
        pool: PoolId,
        options: OfferOptions,
    ) -> Result<HandleId> {
        check_key(key)?;
        self.check_new_handle("an offer")?;
        let own = self.pool(pool)?;
        if !own.serves {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("pool {pool}"))
                .because("it is not registered for serving")
                .remedy("register it with Role::Serve or Role::Both"));
        }
        if options.readers == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "an offer for 0 readers").remedy("give at least 1"));
        }
        if self.live_keys.contains_key(key) {
            return Err(
                Error::new(ErrorKind::DuplicateKey, format!("key {}", String::from_utf8_lossy(key)))
                    .because("an offer with this key is open")
                    .remedy("end it first, or restart it"),
            );
        }
        let layers = own.layout.layers().len();
        let source = source_target(Selection::default());
        let id = self.new_handle();
        let strict = options.deadline.map(|deadline| now + deadline);
        let first = strict.unwrap_or(now + self.config.unmatched_deadline);
        self.timers.set(TimerKey::Deadline(id), first);
        let offer = Offer {
            key: key.to_vec(),
            pool,
            options,
            attempt: 1,
            gate: Gate::new(),
            voided: Vec::new(),
            source,
            released: Released::new(layers),
            reserved: Released::new(layers),
            withheld: Withheld::default(),
            finished: None,
            parts: 0,
            strict,
            hold: now + self.config.hold_max,
            sets: BTreeMap::new(),
            live: BTreeSet::new(),
            verdicts: Vec::new(),
            matched: false,
            ending: None,
            since: now,
        };
        self.offers.insert(id, offer);
        self.live_keys.insert(key.to_vec(), id);
        self.meet_early_claims(now, key, id);
        self.check_offer(now, id);
        Ok(id)
    }

    /// Claims that came, or ended, before their offer.
    fn meet_early_claims(&mut self, now: Time, key: &[u8], id: HandleId) {
        for early in self.keys.begin(now, key) {
            let verdict = MemberVerdict {
                peer: early.peer,
                set: early.set,
                member: early.member,
                verdict: early.verdict,
            };
            let Some(offer) = self.offers.get_mut(&id) else { return };
            if offer.admit(early.set, early.member, early.members).is_ok() {
                offer.matched = true;
                offer.end_member_of(verdict);
            }
        }
        for waiting in self.keys.take_waiting(key) {
            self.remote_claims.remove(&(waiting.peer, waiting.claim.claim));
            self.timers.clear(TimerKey::Waiting(waiting.peer, waiting.claim.claim));
            self.match_claim(now, id, waiting.peer, waiting.claim);
        }
    }

    fn open_offer(&mut self, id: HandleId) -> Result<&mut Offer> {
        self.offers
            .get_mut(&id)
            .filter(|offer| offer.ending.is_none())
            .ok_or_else(super::handle_ended)
    }

    pub(super) fn append_to_offer(&mut self, now: Time, id: HandleId, more: &Selection) -> Result<()> {
        let pool = self.open_offer(id)?.pool;
        let layout = self.pool(pool)?.layout.clone();
        let offer = self.open_offer(id)?;
        offer.check_unfinished()?;
        let mut selection = offer.selection().clone();
        layout.append(&mut selection, more)?;
        offer.source = source_target(selection);
        offer.since = now;
        Ok(())
    }

    pub(super) fn release_part(
        &mut self,
        now: Time,
        id: HandleId,
        tokens: (u32, u32),
        layers: (u16, u16),
        after: Option<EventId>,
    ) -> Result<()> {
        let parts_max = self.config.parts_max;
        let offer = self.open_offer(id)?;
        offer.check_unfinished()?;
        let have = offer
            .selection()
            .groups
            .iter()
            .map(|group| group.token_end)
            .max()
            .unwrap_or(0);
        if tokens.0 >= tokens.1 || tokens.1 > have {
            return Err(Error::new(
                ErrorKind::OutOfBounds,
                format!("a part of tokens {}..{}", tokens.0, tokens.1),
            )
            .because(format!("blocks were appended for tokens below {have}"))
            .remedy("append the blocks first, and release at least one token"));
        }
        if offer.parts >= parts_max {
            return Err(Error::new(ErrorKind::Busy, "one more part")
                .because(format!("an offer has at most {parts_max}"))
                .remedy("release larger parts, or raise limits.parts_max"));
        }
        let range = offer.reserved.release(tokens, layers)?;
        offer.parts += 1;
        offer.since = now;
        self.open_parts(now, id, vec![range], after);
        Ok(())
    }

    pub(super) fn finish_offer_input(
        &mut self,
        now: Time,
        id: HandleId,
        token_end: u32,
        after: Option<EventId>,
    ) -> Result<()> {
        let offer = self.open_offer(id)?;
        offer.check_unfinished()?;
        let short = offer
            .selection()
            .groups
            .iter()
            .map(|group| group.token_end)
            .max()
            .unwrap_or(0);
        if token_end > short {
            return Err(
                Error::new(ErrorKind::OutOfBounds, format!("a request of {token_end} tokens"))
                    .because(format!("blocks were appended for tokens below {short}"))
                    .remedy("append the missing blocks first"),
            );
        }
        let released = offer.reserved.token_end();
        if token_end < released {
            return Err(
                Error::new(ErrorKind::InvalidArgument, format!("a request of {token_end} tokens"))
                    .because(format!("tokens below {released} were released already"))
                    .remedy("finish with the number of tokens that the request has, or restart the offer"),
            );
        }
        offer.finished = Some(token_end);
        offer.since = now;
        let rest = offer.reserved.release_rest(token_end);
        self.open_parts(now, id, rest, after);
        let members: Vec<(Incarnation, u64)> = self.offers[&id].live.iter().copied().collect();
        for (peer, claim) in members {
            self.check_covered(now, peer, claim);
        }
        Ok(())
    }

    /// Gives parts to all members that have a grant: at once, or when the event has happened.
    fn open_parts(&mut self, now: Time, id: HandleId, parts: Vec<PartRange>, after: Option<EventId>) {
        match after.filter(|_| !mutants::is(Mutant::IgnoreEvent)) {
            Some(event) => self.withhold_parts(id, event, parts),
            None => self.give_parts(now, id, &parts),
        }
    }

    /// Gives parts to all members that have a grant, and to those that get one later.
    pub(super) fn give_parts(&mut self, now: Time, id: HandleId, parts: &[PartRange]) {
        let Some(offer) = self.offers.get_mut(&id) else { return };
        for part in parts {
            offer.released.add(part);
        }
        let members: Vec<(Incarnation, u64)> = offer.live.iter().copied().collect();
        for (peer, claim) in members {
            self.give_to_member(now, peer, claim, parts);
        }
    }

    pub(super) fn restart_offer(&mut self, now: Time, id: HandleId) -> Result<()> {
        let pool = self.open_offer(id)?.pool;
        let layers = self.pool(pool)?.layout.layers().len();
        let offer = self.open_offer(id)?;
        offer.attempt += 1;
        offer.gate.close();
        let gate = std::mem::replace(&mut offer.gate, Gate::new());
        offer.voided.retain(|gate| !gate.fenced());
        offer.voided.push(gate);
        offer.source = source_target(Selection::default());
        offer.released = Released::new(layers);
        offer.reserved = Released::new(layers);
        offer.finished = None;
        offer.parts = 0;
        offer.since = now;
        let (attempt, members) = (offer.attempt, offer.live.iter().copied().collect::<Vec<_>>());
        self.forget_withheld(id);
        for (peer, claim) in members {
            self.restart_member(now, peer, claim, attempt);
        }
        Ok(())
    }

    pub(super) fn retract_offer(&mut self, now: Time, id: HandleId, blocks: &[BlockId]) -> Result<Arc<Gate>> {
        let offer = self.open_offer(id)?;
        if blocks.is_empty() {
            return Err(Error::new(ErrorKind::InvalidArgument, "retracting no blocks")
                .because("it would end the offer for nothing")
                .remedy("name the blocks that are taken back, or cancel the offer"));
        }
        let own: BTreeSet<BlockId> = offer
            .selection()
            .groups
            .iter()
            .flat_map(|group| group.blocks.iter().copied())
            .collect();
        if let Some(foreign) = blocks.iter().find(|block| !own.contains(block)) {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("block {foreign}"))
                .because("it does not belong to the offer")
                .remedy("retract blocks that were appended to it"));
        }
        let gate = offer.gate.clone();
        let error = Error::new(ErrorKind::Retracted, "the source blocks")
            .because("they were taken back by their owner")
            .remedy("recompute the request");
        self.end_offer(now, id, error);
        if mutants::is(Mutant::RetractWithoutGate) {
            let other = Gate::new();
            other.close();
            return Ok(other);
        }
        Ok(gate)
    }

    /// Blocks of earlier attempts must not be overwritten before these gates are fenced.
    pub(super) fn gates_of_earlier_attempts(&self, id: HandleId) -> Vec<Arc<Gate>> {
        self.offers
            .get(&id)
            .map(|offer| offer.voided.clone())
            .unwrap_or_default()
    }
}

impl Offer {
    /// Takes a claim of a set in, or says why not.
    pub(super) fn admit(&mut self, set: u128, member: u16, members: u16) -> Result<()> {
        let readers = usize::from(self.options.readers);
        let full = self.sets.len() >= readers && !mutants::is(Mutant::IgnoreReaders);
        let known = match self.sets.entry(set) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(_) if full => {
                return Err(already_claimed(format!(
                    "it serves {readers} readers, which have all come"
                )));
            }
            Entry::Vacant(free) => free.insert(ClaimSet {
                members,
                seen: BTreeSet::new(),
                ended: 0,
            }),
        };
        if known.members != members {
            return Err(
                Error::new(ErrorKind::InvalidArgument, format!("a claim set of {members} members"))
                    .because(format!("another claim of the set said {}", known.members))
                    .remedy("give the same count in all claims of a set"),
            );
        }
        if !known.seen.insert(member) {
            return Err(already_claimed(format!("member {member} of this set has come")));
        }
        Ok(())
    }

    pub(super) fn end_member_of(&mut self, verdict: MemberVerdict) {
        if let Some(set) = self.sets.get_mut(&verdict.set) {
            set.ended += 1;
        }
        self.verdicts.push(verdict);
    }

    fn check_unfinished(&self) -> Result<()> {
        match self.finished {
            None => Ok(()),
            Some(end) => Err(Error::new(ErrorKind::InvalidArgument, "more of a finished offer")
                .because(format!("it was finished at {end} tokens"))
                .remedy("restart it, or offer under another key")),
        }
    }
}

pub(super) fn already_claimed(why: String) -> Error {
    Error::new(ErrorKind::AlreadyClaimed, "the offer")
        .because(why)
        .remedy("open the offer for more readers")
}

/// All layers and heads that the source has.
fn source_target(selection: Selection) -> Arc<Target> {
    Arc::new(Target::Selection {
        selection,
        scope: Scope::EVERYTHING,
    })
}

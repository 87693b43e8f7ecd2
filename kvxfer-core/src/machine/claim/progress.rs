//! A claim's slots, its progress and its end.

use super::*;

impl Machine {
    /// Does what has become possible.
    pub(in crate::machine) fn advance_claim(&mut self, now: Time, id: HandleId) {
        if let Err(error) = self.assign_claim(id).and_then(|()| self.open_claim_slots(now, id)) {
            self.end_claim(now, id, error);
            return;
        }
        if self
            .claims
            .get(&id)
            .is_some_and(|claim| claim.ending.is_none() && claim.is_done())
        {
            self.claim_arrived(now, id);
        }
    }

    /// Once all sources have matched: which of them sends what.
    pub(super) fn assign_claim(&mut self, id: HandleId) -> Result<()> {
        let Some(claim) = self.claims.get_mut(&id) else {
            return Ok(());
        };
        if claim.assigned || claim.ending.is_some() {
            return Ok(());
        }
        let matched: Option<Vec<Arc<PoolLayout>>> = claim
            .sources
            .iter()
            .map(|source| source.matched.as_ref().map(|matched| matched.layout.clone()))
            .collect();
        let Some(layouts) = matched else { return Ok(()) };
        let Some(own) = self.pools.get(&claim.pool) else {
            return Err(crate::machine::pool_unknown(claim.pool));
        };
        let layouts: Vec<&PoolLayout> = layouts.iter().map(Arc::as_ref).collect();
        let scopes = plan::assign(&layouts, &own.layout)?;
        for (source, scope) in claim.sources.iter_mut().zip(scopes) {
            source.need = scope.map_or(Need::Nothing, Need::Scope);
        }
        claim.assigned = true;
        Ok(())
    }

    /// Once assigned and filled: a slot for each source that sends something.
    pub(super) fn open_claim_slots(&mut self, now: Time, id: HandleId) -> Result<()> {
        let Some(claim) = self.claims.get(&id) else {
            return Ok(());
        };
        let Some(selection) = claim.selection.clone() else {
            return Ok(());
        };
        if !claim.assigned || claim.ending.is_some() {
            return Ok(());
        }
        let (pool, sources, pull) = (claim.pool, claim.sources.len(), claim.options.pull);
        let layout = self.pool(pool)?.layout.clone();
        for index in 0..sources {
            let Some(source) = self.claims.get(&id).and_then(|claim| claim.sources.get(index)) else {
                return Ok(());
            };
            let Need::Scope(scope) = &source.need else {
                if !source.arrived {
                    self.tell_nothing(now, id, index);
                }
                continue;
            };
            if source.slot.is_some() || !source.voided.is_empty() {
                continue;
            }
            let target = Target::Selection {
                selection: selection.clone(),
                scope: scope.clone(),
            };
            let bytes = target.bytes(&layout)?;
            if bytes == 0 {
                self.tell_nothing(now, id, index);
                continue;
            }
            let Some(peer) = source.peer() else { continue };
            let target = Arc::new(target);
            let opened = self.open_slot(SlotOwner::Claim(id, peer), Some(peer), pull, pool, target.clone(), None);
            let slot = match opened {
                Ok(slot) => slot,
                Err(error) if error.kind() == ErrorKind::Busy => {
                    // Slots come back as verdicts are acknowledged.
                    self.starved.insert(id);
                    self.timers.set_earlier(TimerKey::Starved, now + RETRY_AFTER);
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            let Some(claim) = self.claims.get_mut(&id) else {
                return Ok(());
            };
            claim.since = now;
            claim.sources[index].slot = Some(slot);
            claim.sources[index].target = Some(target);
            self.grant_claim_slot(now, id, peer, slot);
        }
        Ok(())
    }

    /// Tells a source into which slot of ours its bytes go.
    pub(super) fn grant_claim_slot(&mut self, now: Time, id: HandleId, peer: Incarnation, slot: SlotKey) {
        let name = self.grant_name(slot);
        let address = self.address.clone();
        let Some(claim) = self.claims.get_mut(&id) else { return };
        let (pool, pull, selection) = (claim.pool, claim.options.pull, claim.selection.clone());
        let until = if claim.strict { claim.deadline } else { claim.hold };
        let Some(source) = claim.source_of(peer) else { return };
        let (Need::Scope(scope), Some(matched), Some(selection)) = (&source.need, &source.matched, selection) else {
            return;
        };
        let attempt = matched.attempt;
        let Some(own) = self.pools.get(&pool) else { return };
        let grant = Grant {
            name,
            address,
            access: Access::Write,
            pool,
            geometry_hash: own.layout.geometry_hash(),
            target: Target::Selection {
                selection,
                scope: scope.clone(),
            },
            remaining_ms: until.remaining_ms(now),
        };
        let claim = id.0;
        let message = if pull {
            Message::ClaimPull { claim, attempt, grant }
        } else {
            Message::ClaimGrant { claim, attempt, grant }
        };
        self.send(now, peer, message);
    }

    /// Nothing is needed of this source.
    pub(super) fn tell_nothing(&mut self, now: Time, id: HandleId, index: usize) {
        let Some(source) = self.claims.get_mut(&id).and_then(|claim| claim.sources.get_mut(index)) else {
            return;
        };
        source.need = Need::Nothing;
        source.arrived = true;
        if let Some(peer) = source.peer() {
            self.send(now, peer, Message::ClaimNothing { claim: id.0 });
        }
    }

    /// Claims that found no slot try again.
    pub(in crate::machine) fn on_starved_timer(&mut self, now: Time) {
        for id in std::mem::take(&mut self.starved) {
            self.advance_claim(now, id);
        }
    }

    pub(in crate::machine) fn on_claim_deadline(&mut self, now: Time, id: HandleId) {
        let Some(claim) = self.claims.get_mut(&id) else { return };
        let matched = claim.sources.iter().any(|source| source.matched.is_some());
        if matched && !claim.strict && now < claim.hold {
            claim.deadline = claim.hold;
            self.timers.set(TimerKey::Deadline(id), claim.hold);
            return;
        }
        let error = if matched {
            Error::new(ErrorKind::DeadlineExceeded, "the claim")
                .because(format!("it waited for: {}", self.claims[&id].waits_for(self)))
                .remedy("allow more time, or look at the source")
        } else {
            Error::new(ErrorKind::Unclaimed, "the claim")
                .because("no offer met it before its deadline")
                .remedy("check the key and the source addresses")
        };
        self.end_claim(now, id, error);
    }

    // --------------------------------------------------------------------------------------------- its end

    /// Ends a claim with this error, unless all its bytes are in place. The end is reported when it is fenced.
    pub(in crate::machine) fn end_claim(&mut self, now: Time, id: HandleId, error: Error) {
        let Some(claim) = self.claims.get(&id) else { return };
        if claim.ending.is_some() {
            return;
        }
        let slots: Vec<(usize, SlotKey)> = claim
            .sources
            .iter()
            .enumerate()
            .filter_map(|(index, source)| source.slot.map(|slot| (index, slot)))
            .collect();
        for (index, slot) in slots {
            // Arrived wins over a crossing end.
            if self.close_slot(slot)
                && let Some(claim) = self.claims.get_mut(&id)
            {
                claim.sources[index].arrived = true;
            }
        }
        self.stop_claim_reads(now, id);
        self.timers.clear(TimerKey::Deadline(id));
        self.starved.remove(&id);
        let Some(claim) = self.claims.get(&id) else { return };
        let limit = now + self.fence_limit(claim.sources.iter().filter_map(Source::peer));
        if claim.is_done() {
            self.claim_arrived(now, id);
            return;
        }
        let Some(claim) = self.claims.get_mut(&id) else { return };
        let error = if claim.slots().next().is_some() {
            maybe_written(&error)
        } else {
            error
        };
        claim.since = now;
        claim.ending = Some(Ending {
            error,
            links: Vec::new(),
        });
        self.fencing.insert(id);
        self.timers.set(TimerKey::Fence(id), limit);
        // Looked at after this input has been dealt with: by then it is known which links it waits for.
        self.fences_changed = true;
    }

    /// Looks whether what this claim waits for is fenced: its end, or the slot of an earlier attempt.
    pub(in crate::machine) fn look_at_claim_fence(&mut self, now: Time, id: HandleId) {
        self.drop_voided_slots(now, id);
        let Some(claim) = self.claims.get(&id) else { return };
        let Some(ending) = &claim.ending else {
            if claim.sources.iter().all(|source| source.voided.is_empty()) {
                self.fencing.remove(&id);
                self.timers.clear(TimerKey::Fence(id));
                self.advance_claim(now, id);
            }
            return;
        };
        let fenced = claim.slots().all(|slot| self.slot_is_fenced(slot))
            && (ending.links.iter().all(|link| self.link_is_closed(*link)) || claim.slots().next().is_none());
        if fenced {
            let error = ending.error.clone();
            self.finish_claim(now, id, Err(error));
        }
    }

    /// Slots of earlier attempts that are fenced have ended.
    pub(super) fn drop_voided_slots(&mut self, now: Time, id: HandleId) {
        let Some(claim) = self.claims.get(&id) else { return };
        let fenced: Vec<SlotKey> = claim
            .sources
            .iter()
            .flat_map(|source| source.voided.iter().copied())
            .filter(|slot| self.slot_is_fenced(*slot))
            .collect();
        for slot in fenced {
            if let Some(claim) = self.claims.get_mut(&id) {
                for source in &mut claim.sources {
                    source.voided.retain(|voided| *voided != slot);
                }
            }
            let error = Error::new(ErrorKind::Cancelled, "an earlier attempt").because("the offer was restarted");
            self.end_slot(now, slot, Verdict::Failed(error));
        }
    }

    /// The fence took too long.
    pub(in crate::machine) fn claim_not_fenced(&mut self, now: Time, id: HandleId) {
        let Some(claim) = self.claims.get(&id) else { return };
        let error = match &claim.ending {
            Some(ending) => ending.error.clone(),
            None => Error::new(ErrorKind::Internal, "an earlier attempt of the claim")
                .because("a data thread or device did not let go of its blocks"),
        };
        let links_closed = claim
            .ending
            .as_ref()
            .is_none_or(|ending| ending.links.iter().all(|link| self.link_is_closed(*link)));
        let slots: Vec<SlotKey> = claim.slots().collect();
        if claim.ending.is_none() {
            for &slot in &slots {
                self.close_slot(slot);
            }
        }
        let error = quarantined(&error);
        for slot in slots {
            if !links_closed || !self.slot_is_fenced(slot) {
                self.quarantine_slot(now, slot, &error);
            }
        }
        self.finish_claim(now, id, Err(error));
    }

    pub(super) fn claim_arrived(&mut self, now: Time, id: HandleId) {
        let bytes = self.claims.get(&id).map_or(0, |claim| claim.arrived_bytes(self));
        self.finish_claim(now, id, Ok(Outcome::Arrived { bytes }));
    }

    /// Reports the end and tells all sources.
    pub(super) fn finish_claim(&mut self, now: Time, id: HandleId, result: Result<Outcome>) {
        let unsent = self.claim_message(now, id);
        self.stop_claim_reads(now, id);
        let Some(claim) = self.claims.remove(&id) else { return };
        self.timers.clear(TimerKey::Deadline(id));
        self.timers.clear(TimerKey::Fence(id));
        self.fencing.remove(&id);
        self.starved.remove(&id);
        let verdict = match &result {
            Ok(_) => Verdict::Arrived,
            Err(error) => Verdict::Failed(error.clone()),
        };
        self.complete(id, result);
        for source in claim.sources {
            for &slot in &source.voided {
                self.end_slot(now, slot, verdict.clone());
            }
            let Some(peer) = source.peer() else { continue };
            if let Some(slot) = source.slot
                && self.slot_uses.get(&slot).is_some_and(|used| !used.quarantined)
            {
                self.ended_claims.insert((peer, id.0), slot);
                self.end_slot(now, slot, verdict.clone());
            }
            if source.sent {
                let verdict = verdict.clone();
                self.send(now, peer, Message::ClaimEnded { claim: id.0, verdict });
            } else if let (Some(peer), Some(message)) = (self.peers.get_mut(&peer), &unsent)
                && peer.unsent_ends.len() < self.config.waiting_claims_max
            {
                peer.unsent_ends.push((message.clone(), verdict.clone()));
            }
        }
    }

    /// The source has noted how the claim ended: the slot may be reused.
    pub(in crate::machine) fn claim_end_acknowledged(&mut self, now: Time, peer: Incarnation, claim: u64) {
        if let Some(slot) = self.ended_claims.remove(&(peer, claim)) {
            self.slot_acknowledged(now, peer, slot);
        }
    }

    /// The claim with this number, if it is open and not ending. Others were ended here: the peer has been told.
    pub(super) fn open_claim(&mut self, claim: u64) -> Option<&mut Claim> {
        self.claims
            .get_mut(&HandleId(claim))
            .filter(|claim| claim.ending.is_none())
    }
}

impl Claim {
    fn arrived_bytes(&self, machine: &Machine) -> u64 {
        self.sources
            .iter()
            .filter_map(|source| source.slot)
            .filter_map(|slot| machine.slots.progress(slot.0, slot.1))
            .map(|progress| progress.total_bytes)
            .sum()
    }
}

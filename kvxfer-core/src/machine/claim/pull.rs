//! Pulled claims: parts announced by the sources, read by this endpoint's device or sent when asked for.

use super::super::links::{RemoteSide, TransferOwner};
use super::*;
use crate::flow::{Gate, PARTS_PER_SLOT_MAX, PartExtent, SendPart, SendSpec};

/// A part that a source has announced.
pub(in crate::machine) struct ReadyPart {
    pub(in crate::machine) attempt: u32,
    pub(in crate::machine) part: u32,
    pub(in crate::machine) extent: PartExtent,
    /// Where its bytes are at the source, if that can be read by a device.
    pub(in crate::machine) source: Option<Target>,
}

impl Machine {
    /// Pull: a part may be read.
    pub(in crate::machine) fn part_ready(
        &mut self,
        now: Time,
        peer: Incarnation,
        claim: u64,
        ready: ReadyPart,
    ) -> Result<()> {
        let Some(claim_state) = self.open_claim(claim) else {
            return Ok(());
        };
        if !claim_state.options.pull {
            return Err(protocol("a part to pull for a claim that is pushed"));
        }
        let current = claim_state.source_of(peer).is_some_and(|source| {
            source.slot.is_some()
                && source
                    .matched
                    .as_ref()
                    .is_some_and(|matched| matched.attempt == ready.attempt)
        });
        if !current {
            return Ok(());
        }
        let id = HandleId(claim);
        match ready.source {
            Some(blocks) if self.path_is_one_sided(peer) => {
                let made = self.read_stream(id, peer, ready.part, ready.extent, blocks);
                match made {
                    Ok(Some(part)) => self.read_claim_part(now, id, peer, part)?,
                    Ok(None) => {}
                    Err(error) => self.end_claim(now, id, error),
                }
            }
            _ => self.ask_for_parts(now, id, peer, &[ready.part]),
        }
        Ok(())
    }

    /// The part as segments of both sides.
    fn read_stream(
        &self,
        id: HandleId,
        peer: Incarnation,
        part: u32,
        extent: PartExtent,
        blocks: Target,
    ) -> Result<Option<SendPart>> {
        let Some(claim) = self.claims.get(&id) else {
            return Ok(None);
        };
        let own = &self.pool(claim.pool)?.layout;
        let Some(source) = claim.sources.iter().find(|source| source.peer() == Some(peer)) else {
            return Ok(None);
        };
        let (Some(matched), Some(target)) = (&source.matched, &source.target) else {
            return Ok(None);
        };
        blocks.check(&matched.layout)?;
        let stream = target.stream(own, extent)?;
        let remote = plan::source_stream(&matched.layout, &Arc::new(blocks), own, target, extent)?;
        Ok(Some(SendPart {
            part,
            extent,
            stream,
            remote: Some(remote),
        }))
    }

    /// Gives a part to this endpoint's device.
    fn read_claim_part(&mut self, now: Time, id: HandleId, peer: Incarnation, part: SendPart) -> Result<()> {
        let Some(claim) = self.claims.get_mut(&id) else {
            return Ok(());
        };
        let (pool, until) = (claim.pool, if claim.strict { claim.deadline } else { claim.hold });
        let Some(source) = claim.source_of(peer) else {
            return Ok(());
        };
        let (Some(slot), Some(matched)) = (source.slot, source.matched.clone()) else {
            return Ok(());
        };
        let read = match source.read {
            Some(read) => {
                self.check_next_part(read, part.part)?;
                read
            }
            None => {
                let Some(own) = self.pools.get(&pool) else {
                    return Ok(());
                };
                let regions = own.regions.clone();
                let remote = RemoteSide {
                    pool: matched.pool,
                    written: None,
                };
                let read = self.begin_transfer(peer, TransferOwner::ClaimRead(id, peer), remote, |id| SendSpec {
                    id,
                    slot: slot.0,
                    generation: slot.1,
                    // The fence of what is read lies with its owner; what is written is fenced by the slot.
                    gate: Gate::new(),
                    regions,
                    message: None,
                    priority: 0,
                    deadline: Some(until),
                    checksum: false,
                    remote: None,
                });
                if let Some(source) = self.claims.get_mut(&id).and_then(|claim| claim.source_of(peer)) {
                    source.read = Some(read);
                }
                read
            }
        };
        self.add_part(now, read, part);
        Ok(())
    }

    /// A source announces each part once, in the order of their numbers.
    fn check_next_part(&self, read: TransferId, part: u32) -> Result<()> {
        let parts = self.link_transfers.get(&read).map(|transfer| transfer.parts_so_far());
        match parts {
            Some((count, _)) if count >= PARTS_PER_SLOT_MAX => Err(protocol("too many parts to pull")),
            Some((_, Some(last))) if part <= last => Err(protocol("a part to pull that was announced before")),
            _ => Ok(()),
        }
    }

    /// The source sends these parts.
    pub(in crate::machine) fn ask_for_parts(&mut self, now: Time, id: HandleId, peer: Incarnation, parts: &[u32]) {
        let Some(claim) = self.claims.get_mut(&id).filter(|claim| claim.ending.is_none()) else {
            return;
        };
        let Some(attempt) = claim
            .source_of(peer)
            .and_then(|source| source.matched.as_ref())
            .map(|matched| matched.attempt)
        else {
            return;
        };
        let claim = id.0;
        for &part in parts {
            self.send(now, peer, Message::ReadPart { claim, attempt, part });
        }
    }

    /// The link is done with what was read of a source.
    pub(in crate::machine) fn claim_read_over(&mut self, id: HandleId, peer: Incarnation, read: TransferId) {
        if let Some(source) = self.claims.get_mut(&id).and_then(|claim| claim.source_of(peer))
            && source.read == Some(read)
        {
            source.read = None;
        }
    }

    /// Nothing more is read for this claim.
    pub(super) fn stop_claim_reads(&mut self, now: Time, id: HandleId) {
        let Some(claim) = self.claims.get_mut(&id) else { return };
        let reads: Vec<TransferId> = claim
            .sources
            .iter_mut()
            .filter_map(|source| source.read.take())
            .collect();
        for read in reads {
            self.stop_transfer(now, read, None);
        }
    }
}

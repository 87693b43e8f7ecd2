//! Where a claim's bytes go: what its destination granted, given part by part as the offer releases them.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::links::{RemoteSide, TransferOwner};
use super::member::{RemoteClaim, protocol};
use super::released::PartRange;
use super::types::HandleId;
use super::{Machine, UseOwner};
use crate::error::{Error, ErrorKind, Result};
use crate::flow::{PartExtent, SendPart, SendSpec, TransferId};
use crate::id::{GrantName, Incarnation};
use crate::layout::PoolLayout;
use crate::mutants::{self, Mutant};
use crate::plan::{self, Scope, Target};
use crate::time::Time;
use crate::wire::{Access, Grant, Message};

/// Where a member's bytes go, in the offer's current attempt.
#[derive(Debug)]
pub(super) struct MemberGrant {
    pub(super) name: GrantName,
    target: Arc<Target>,
    layout: Arc<PoolLayout>,
    /// For each layer of the source: its index in the grant's scope.
    layers: Vec<Option<u16>>,
    pub(super) transfer: Option<TransferId>,
    next_part: u32,
    total: u64,
    given: u64,
    /// Pull: parts that the reader was told of and has not asked for.
    pub(super) announced: BTreeMap<u32, SendPart>,
}

impl Machine {
    /// The destination says where to write, or what it will read.
    pub(super) fn member_granted(
        &mut self,
        now: Time,
        peer: Incarnation,
        claim: u64,
        attempt: u32,
        grant: Grant,
        pull: bool,
    ) -> Result<()> {
        if matches!(self.remote_claims.get(&(peer, claim)), Some(RemoteClaim::Waiting(_))) {
            return Err(protocol("a grant for a claim that has not matched"));
        }
        if grant.name.incarnation != peer || grant.access != Access::Write {
            return Err(protocol("a claim's grant that is not its owner's"));
        }
        let Some(member) = self.member(peer, claim) else {
            self.acknowledge_verdict(now, peer, grant.name);
            return Ok(());
        };
        if member.pull != pull {
            return Err(protocol("a pulled claim that is pushed, or the other way round"));
        }
        let (id, ended) = (member.offer, member.source_ended);
        let Some(offer) = self.offers.get(&id) else {
            return Ok(());
        };
        if attempt > offer.attempt {
            return Err(protocol("a grant for an attempt that is to come"));
        }
        if attempt < offer.attempt || ended || offer.is_ending() {
            // It crossed a restart or an end. Nothing was, or will be, sent to it.
            self.acknowledge_verdict(now, peer, grant.name);
            return Ok(());
        }
        let keep = mutants::is(Mutant::KeepOldAttempt);
        if self.member(peer, claim).is_some_and(|member| member.grant.is_some()) && !keep {
            return Err(protocol("a second grant for one attempt"));
        }
        match self.accept_member_grant(now, peer, claim, id, grant) {
            Ok(parts) => {
                self.give_to_member(now, peer, claim, &parts);
                self.check_covered(now, peer, claim);
            }
            Err(error) => self.end_member_from_source(now, peer, claim, error),
        }
        Ok(())
    }

    /// Prepares a transfer into the grant. Returns what has been released before it came.
    fn accept_member_grant(
        &mut self,
        now: Time,
        peer: Incarnation,
        claim: u64,
        id: HandleId,
        grant: Grant,
    ) -> Result<Vec<PartRange>> {
        let advert = self.peers.get(&peer).and_then(|peer| peer.pools.get(&grant.pool));
        let Some(layout) = advert
            .filter(|advert| advert.receives)
            .map(|advert| advert.layout.clone())
        else {
            return Err(Error::new(
                ErrorKind::NotRegistered,
                format!("the destination's pool {}", grant.pool),
            )
            .because("it is not registered for receiving"));
        };
        super::check_geometry(&layout, grant.geometry_hash, grant.pool)?;
        let Target::Selection { scope, .. } = &grant.target else {
            return Err(Error::new(ErrorKind::Unsupported, "a claim's grant of explicit pieces"));
        };
        let Some(offer) = self.offers.get(&id) else {
            return Err(super::handle_ended());
        };
        let Some(own) = self.pools.get(&offer.pool) else {
            return Err(super::pool_unknown(offer.pool));
        };
        let layers = map_layers(&own.layout, &layout, scope);
        let parts = offer.released.all(offer.finished.unwrap_or(0));
        let (gate, options) = (offer.gate.clone(), offer.options.clone());
        let total = grant.target.bytes(&layout)?;
        let until = now + std::time::Duration::from_millis(grant.remaining_ms);
        let deadline = offer.strict.map_or(until, |strict| strict.min(until));
        let regions = own.regions.clone();
        let name = grant.name;
        let target = Arc::new(grant.target);
        let remote = RemoteSide {
            pool: grant.pool,
            written: Some((layout.clone(), target.clone())),
        };
        let transfer = self.begin_transfer(peer, TransferOwner::Member(peer, claim), remote, |id| SendSpec {
            id,
            slot: name.slot,
            generation: name.generation,
            gate,
            regions,
            message: None,
            priority: options.priority,
            deadline: Some(deadline),
            checksum: options.checksum,
            remote: None,
        });
        if let Some(member) = self.member(peer, claim) {
            member.last_grant = Some(name);
            member.grant = Some(MemberGrant {
                name,
                target,
                layout,
                layers,
                transfer: Some(transfer),
                next_part: 0,
                total,
                given: 0,
                announced: BTreeMap::new(),
            });
        }
        self.uses.insert(name, UseOwner::Member(peer, claim));
        Ok(parts)
    }

    /// Sends released parts to a member, as far as its grant covers them.
    pub(super) fn give_to_member(&mut self, now: Time, peer: Incarnation, claim: u64, parts: &[PartRange]) {
        for part in parts {
            if let Err(error) = self.give_part_to_member(now, peer, claim, *part) {
                self.end_member_from_source(now, peer, claim, error);
                return;
            }
        }
    }

    fn give_part_to_member(&mut self, now: Time, peer: Incarnation, claim: u64, part: PartRange) -> Result<()> {
        let one_sided = self.path_is_one_sided(peer);
        let Some(RemoteClaim::Member(member)) = self.remote_claims.get_mut(&(peer, claim)) else {
            return Ok(());
        };
        if member.source_ended {
            return Ok(());
        }
        let Some(offer) = self.offers.get(&member.offer) else {
            return Ok(());
        };
        let (Some(grant), Some(own)) = (member.grant.as_mut(), self.pools.get(&offer.pool)) else {
            return Ok(());
        };
        let (attempt, pull) = (offer.attempt, member.pull);
        let mut made = Vec::new();
        for (layer_start, layer_end) in grant.runs(part.layers) {
            let extent = PartExtent {
                token_start: part.tokens.0,
                token_end: part.tokens.1,
                layer_start,
                layer_end,
                states: part.states,
            };
            let stream = plan::source_stream(&own.layout, &offer.source, &grant.layout, &grant.target, extent)?;
            if stream.length() == 0 {
                continue;
            }
            grant.given += stream.length();
            made.push(SendPart {
                part: grant.next_part,
                extent,
                stream,
                remote: None,
            });
            grant.next_part += 1;
        }
        if !pull && grant.given >= grant.total {
            member.may_have_arrived = true;
        }
        let Some(transfer) = grant.transfer else { return Ok(()) };
        if pull {
            let told: Vec<(u32, PartExtent)> = made.iter().map(|part| (part.part, part.extent)).collect();
            let blocks = one_sided.then(|| offer.source.clone());
            let layout = own.layout.clone();
            grant.announced.extend(made.into_iter().map(|part| (part.part, part)));
            for (part, extent) in told {
                self.send(
                    now,
                    peer,
                    Message::PartReady {
                        claim,
                        attempt,
                        part,
                        extent,
                        source: blocks.as_deref().and_then(|blocks| restricted(&layout, blocks, extent)),
                    },
                );
            }
        } else {
            for part in made {
                self.add_part(now, transfer, part);
            }
        }
        Ok(())
    }

    /// Pull: the reader wants a part.
    pub(super) fn read_part(
        &mut self,
        now: Time,
        peer: Incarnation,
        claim: u64,
        attempt: u32,
        part: u32,
    ) -> Result<()> {
        let current = match self.member(peer, claim).map(|member| member.offer) {
            Some(offer) => self.offers.get(&offer).map(|offer| offer.attempt),
            None => None,
        };
        if current != Some(attempt) {
            return Ok(());
        }
        let Some(member) = self.member(peer, claim).filter(|member| !member.source_ended) else {
            return Ok(());
        };
        let Some(grant) = member.grant.as_mut() else {
            return Ok(());
        };
        let Some(part) = grant.announced.remove(&part) else {
            return Err(protocol("a part to read that was not announced"));
        };
        if let Some(transfer) = grant.transfer {
            self.add_part(now, transfer, part);
        }
        Ok(())
    }

    /// Pull: were the bytes that the reader has still what was meant?
    pub(super) fn validate_member(&mut self, now: Time, peer: Incarnation, claim: u64, attempt: u32) {
        let offer = self
            .member(peer, claim)
            .filter(|member| !member.source_ended)
            .map(|member| member.offer)
            .and_then(|offer| self.offers.get(&offer));
        let live = offer.is_some_and(|offer| !offer.is_ending() && offer.attempt == attempt && !offer.gate.is_closed());
        if live && let Some(member) = self.member(peer, claim) {
            member.may_have_arrived = true;
        }
        self.send(
            now,
            peer,
            Message::Validated {
                id: claim,
                claim: true,
                live,
            },
        );
    }

    /// Once the request's length is known: whether the destination wants more than there is.
    pub(super) fn check_covered(&mut self, now: Time, peer: Incarnation, claim: u64) {
        let Some(RemoteClaim::Member(member)) = self.remote_claims.get(&(peer, claim)) else {
            return;
        };
        let Some(end) = self.offers.get(&member.offer).and_then(|offer| offer.finished) else {
            return;
        };
        let Some(Target::Selection { selection, .. }) = member.grant.as_ref().map(|grant| &*grant.target) else {
            return;
        };
        let wanted = selection.groups.iter().map(|group| group.token_end).max().unwrap_or(0);
        if wanted > end {
            let error = Error::new(
                ErrorKind::InvalidArgument,
                format!("tokens {end}..{wanted} of the claim"),
            )
            .because(format!("the request has {end} tokens"))
            .remedy("claim no more tokens than the request has");
            self.end_member_from_source(now, peer, claim, error);
        }
    }
}

impl MemberGrant {
    /// The layers of a part as runs of neighbours in the grant's scope.
    fn runs(&self, layers: (u16, u16)) -> Vec<(u16, u16)> {
        let mut indices: Vec<u16> = self
            .layers
            .iter()
            .take(usize::from(layers.1))
            .skip(usize::from(layers.0))
            .flatten()
            .copied()
            .collect();
        indices.sort_unstable();
        let mut runs: Vec<(u16, u16)> = Vec::new();
        for index in indices {
            match runs.last_mut() {
                Some(run) if run.1 == index => run.1 += 1,
                _ => runs.push((index, index + 1)),
            }
        }
        runs
    }
}

/// What of the source's blocks a part is in.
fn restricted(layout: &PoolLayout, blocks: &Target, extent: PartExtent) -> Option<Target> {
    match blocks {
        Target::Selection { selection, scope } => Some(Target::Selection {
            selection: layout.restrict(selection, (extent.token_start, extent.token_end), extent.states),
            scope: scope.clone(),
        }),
        // Offers have selections.
        Target::Descriptors(_) => None,
    }
}

/// For each layer of the source, by its id: where the grant's scope has it.
fn map_layers(source: &PoolLayout, destination: &PoolLayout, scope: &Scope) -> Vec<Option<u16>> {
    let wanted: BTreeMap<&str, u16> = destination
        .layers()
        .iter()
        .zip(0u16..)
        .filter_map(|(name, layer)| Some((name.as_str(), scope.position(layer)?)))
        .collect();
    source
        .layers()
        .iter()
        .map(|name| wanted.get(name.as_str()).copied())
        .collect()
}

//! Grants of this endpoint: written once by whoever holds them, or read once.

use std::sync::Arc;

use super::links::{RemoteSide, TransferOwner};
use super::slots::{SlotKey, SlotOwner, maybe_written, quarantined, unknown};
use super::timers::TimerKey;
use super::types::{GrantOptions, HandleId, Outcome};
use super::{Ending, Machine, READ_SLOTS_FROM};
use crate::error::{Error, ErrorKind, Result};
use crate::flow::{Gate, PartExtent, SendPart, SendSpec, SlotWatcher, TransferId};
use crate::id::{Generation, GrantName, Incarnation, PoolId, SlotId};
use crate::mutants::{self, Mutant};
use crate::plan::{self, Target};
use crate::time::Time;
use crate::wire::{Access, Grant, Message, Verdict};

/// A write grant that is open.
#[derive(Debug)]
pub(super) struct WriteGrant {
    pub(super) slot: SlotKey,
    pub(super) pool: PoolId,
    bytes: u64,
    ending: Option<Ending>,
    pub(super) since: Time,
}

/// A read grant that is open.
#[derive(Debug)]
pub(super) struct Serve {
    pub(super) name: GrantName,
    pub(super) pool: PoolId,
    target: Arc<Target>,
    bytes: u64,
    holder: Option<Incarnation>,
    gate: Arc<Gate>,
    reader: Option<Reader>,
    ending: Option<Error>,
    /// How it has ended, says its reader: reported once its blocks are fenced.
    decided: Option<Result<Outcome>>,
    pub(super) since: Time,
}

/// Who reads.
#[derive(Debug, Clone, Copy)]
struct Reader {
    peer: Incarnation,
    read: u64,
    /// Its slot, if it was sent to and not read by its own device.
    into: Option<GrantName>,
    transfer: Option<TransferId>,
    /// The reader was told that what it has is good.
    validated: bool,
}

impl WriteGrant {
    pub(super) fn waits_for(&self) -> &'static str {
        if self.ending.is_some() { "fence" } else { "parts" }
    }
}

impl Serve {
    pub(super) fn waits_for(&self) -> &'static str {
        match (&self.ending, &self.reader) {
            (Some(_), _) => "fence",
            (None, None) => "peer",
            (None, Some(_)) => "verdict",
        }
    }
}

impl Machine {
    pub(super) fn begin_grant(
        &mut self,
        now: Time,
        pool: PoolId,
        access: Access,
        target: Target,
        options: GrantOptions,
        watcher: Option<Arc<dyn SlotWatcher>>,
    ) -> Result<(HandleId, Grant)> {
        self.check_new_handle("a grant")?;
        let own = self.pool(pool)?;
        let allowed = match access {
            Access::Write => own.receives,
            Access::Read => own.serves,
        };
        if !allowed {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("pool {pool}"))
                .because("its role does not allow this grant")
                .remedy("register it with Role::Both, or with the role that is needed"));
        }
        if let Target::Selection { selection, .. } = &target {
            own.layout.check(selection)?;
        }
        let bytes = target.bytes(&own.layout)?;
        if bytes == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "a grant of 0 bytes")
                .because("there would be nothing whose arrival ends it")
                .remedy("select at least one token"));
        }
        let geometry_hash = own.layout.geometry_hash();
        let id = self.new_handle();
        let deadline = now + options.deadline.unwrap_or(self.config.hold_max);
        let name = match access {
            Access::Write => {
                let owner = SlotOwner::Grant(id);
                let slot = self.open_slot(owner, options.holder, false, pool, Arc::new(target.clone()), watcher)?;
                self.grants.insert(
                    id,
                    WriteGrant {
                        slot,
                        pool,
                        bytes,
                        ending: None,
                        since: now,
                    },
                );
                self.grant_name(slot)
            }
            Access::Read => {
                let name = self.new_read_name();
                self.serve_names.insert(name, id);
                self.serves.insert(
                    id,
                    Serve {
                        name,
                        pool,
                        target: Arc::new(target.clone()),
                        bytes,
                        holder: options.holder,
                        gate: Gate::new(),
                        reader: None,
                        ending: None,
                        decided: None,
                        since: now,
                    },
                );
                name
            }
        };
        self.timers.set(TimerKey::Deadline(id), deadline);
        let grant = Grant {
            name,
            address: self.address.clone(),
            access,
            pool,
            geometry_hash,
            target,
            remaining_ms: deadline.remaining_ms(now),
        };
        Ok((id, grant))
    }

    /// Read grants have no slot in the table, where a peer could write into them: their numbers lie beyond.
    fn new_read_name(&mut self) -> GrantName {
        let number = self.next_read;
        self.next_read += 1;
        GrantName {
            incarnation: self.incarnation,
            slot: SlotId(READ_SLOTS_FROM | (number as u32 & !READ_SLOTS_FROM)),
            generation: Generation((number >> 31) as u32),
        }
    }

    // -------------------------------------------------------------------------------------------- written

    pub(super) fn grant_arrived(&mut self, now: Time, id: HandleId) {
        let Some(grant) = self.grants.get(&id) else { return };
        let (slot, bytes) = (grant.slot, grant.bytes);
        let message = self
            .slots
            .progress(slot.0, slot.1)
            .and_then(|progress| progress.message);
        self.finish_grant(now, id, Ok(Outcome::Granted { bytes, message }));
    }

    /// Ends a write grant, unless all its bytes are in place.
    pub(super) fn end_grant(&mut self, now: Time, id: HandleId, error: Error) {
        let Some(grant) = self.grants.get(&id).filter(|grant| grant.ending.is_none()) else {
            return;
        };
        let slot = grant.slot;
        if self.close_slot(slot) {
            self.grant_arrived(now, id);
            return;
        }
        if let Some(grant) = self.grants.get_mut(&id) {
            grant.since = now;
            grant.ending = Some(Ending {
                error: maybe_written(&error),
                links: Vec::new(),
            });
        }
        self.fencing.insert(id);
        self.timers.clear(TimerKey::Deadline(id));
        let writer = self.slots.progress(slot.0, slot.1).and_then(|progress| progress.writer);
        let limit = self.fence_limit(writer);
        self.timers.set(TimerKey::Fence(id), now + limit);
        self.fences_changed = true;
    }

    pub(super) fn look_at_grant_fence(&mut self, now: Time, id: HandleId) {
        let Some(grant) = self.grants.get(&id) else { return };
        let Some(ending) = &grant.ending else { return };
        if self.slot_is_fenced(grant.slot) && ending.links.iter().all(|link| self.link_is_closed(*link)) {
            let error = ending.error.clone();
            self.finish_grant(now, id, Err(error));
        }
    }

    pub(super) fn grant_not_fenced(&mut self, now: Time, id: HandleId) {
        let Some(grant) = self.grants.get(&id) else { return };
        let Some(ending) = &grant.ending else { return };
        let error = quarantined(&ending.error);
        let slot = grant.slot;
        self.quarantine_slot(now, slot, &error);
        self.finish_grant(now, id, Err(error));
    }

    fn finish_grant(&mut self, now: Time, id: HandleId, result: Result<Outcome>) {
        let Some(grant) = self.grants.remove(&id) else { return };
        self.forget_timers(id);
        let verdict = match &result {
            Ok(_) => Verdict::Arrived,
            Err(error) => Verdict::Failed(error.clone()),
        };
        self.complete(id, result);
        self.end_slot(now, grant.slot, verdict);
    }

    /// Grants that a lost peer was using.
    pub(super) fn grants_lost(&mut self, now: Time, peer: Incarnation, error: &Error) {
        let link = self.closing_link(peer);
        let used: Vec<HandleId> = self
            .grants
            .iter()
            .filter(|(_, grant)| {
                let slot = grant.slot;
                let bound = self.slot_uses.get(&slot).and_then(|used| used.peer);
                // Bound by a holder or a question, else by the first chunk.
                let written = || self.slots.progress(slot.0, slot.1).and_then(|progress| progress.writer);
                bound.or_else(written) == Some(peer)
            })
            .map(|(id, _)| *id)
            .collect();
        for id in used {
            self.end_grant(now, id, error.clone());
            if let Some(ending) = self.grants.get_mut(&id).and_then(|grant| grant.ending.as_mut()) {
                ending.links.extend(link);
            }
        }
    }

    // ----------------------------------------------------------------------------------------------- read

    /// A peer uses a read grant: sends its blocks into the reader's slot.
    pub(super) fn read_requested(
        &mut self,
        now: Time,
        peer: Incarnation,
        read: u64,
        name: GrantName,
        into: Grant,
    ) -> Result<()> {
        if into.name.incarnation != peer || into.access != Access::Write {
            return Err(Error::new(
                ErrorKind::Protocol,
                "a read into a grant that is not the reader's",
            ));
        }
        let slot = into.name;
        if let Err(error) = self.begin_read(now, peer, read, name, into) {
            self.send(now, peer, Message::ReadRefused { read, error });
            self.acknowledge_verdict(now, peer, slot);
        }
        Ok(())
    }

    fn begin_read(&mut self, now: Time, peer: Incarnation, read: u64, name: GrantName, into: Grant) -> Result<()> {
        let (id, serve) = self.readable(peer, read, name)?;
        let own = self.pool(serve.pool)?;
        let advert = self.peers.get(&peer).and_then(|peer| peer.pools.get(&into.pool));
        let Some(layout) = advert
            .filter(|advert| advert.receives)
            .map(|advert| advert.layout.clone())
        else {
            return Err(
                Error::new(ErrorKind::NotRegistered, format!("the reader's pool {}", into.pool))
                    .because("it is not registered for receiving"),
            );
        };
        super::check_geometry(&layout, into.geometry_hash, into.pool)?;
        let target = Arc::new(into.target);
        let stream = plan::source_stream(&own.layout, &serve.target, &layout, &target, PartExtent::WHOLE)?;
        let (gate, regions) = (serve.gate.clone(), own.regions.clone());
        let until = now + std::time::Duration::from_millis(into.remaining_ms);
        let to = into.name;
        let remote = RemoteSide {
            pool: into.pool,
            written: Some((layout, target)),
        };
        let transfer = self.begin_transfer(peer, TransferOwner::Serve(id), remote, |id| SendSpec {
            id,
            slot: to.slot,
            generation: to.generation,
            gate,
            regions,
            message: None,
            priority: 0,
            deadline: Some(until),
            checksum: false,
            remote: None,
        });
        if let Some(serve) = self.serves.get_mut(&id) {
            serve.since = now;
            serve.reader = Some(Reader {
                peer,
                read,
                into: Some(to),
                transfer: Some(transfer),
                validated: false,
            });
        }
        let part = SendPart {
            part: 0,
            extent: PartExtent::WHOLE,
            stream,
            remote: None,
        };
        self.add_part(now, transfer, part);
        Ok(())
    }

    /// A peer's device reads the blocks of a read grant.
    pub(super) fn read_direct_requested(&mut self, now: Time, peer: Incarnation, read: u64, name: GrantName) {
        let id = match self.readable(peer, read, name) {
            Ok((id, _)) => id,
            Err(error) => {
                self.send(now, peer, Message::ReadRefused { read, error });
                return;
            }
        };
        if let Some(serve) = self.serves.get_mut(&id) {
            serve.since = now;
            serve.reader = Some(Reader {
                peer,
                read,
                into: None,
                transfer: None,
                validated: false,
            });
        }
    }

    /// The read grant, if this peer may read it now: once, or again in another way if its device could not.
    fn readable(&self, peer: Incarnation, read: u64, name: GrantName) -> Result<(HandleId, &Serve)> {
        let other = |reader: Reader| (reader.peer, reader.read, reader.into) != (peer, read, None);
        self.serve_names
            .get(&name)
            .and_then(|id| Some((*id, self.serves.get(id)?)))
            .filter(|(_, serve)| !serve.reader.is_some_and(other) && serve.ending.is_none() && serve.decided.is_none())
            .filter(|(_, serve)| serve.holder.is_none_or(|holder| holder == peer))
            .ok_or_else(|| {
                Error::new(ErrorKind::NotOffered, format!("read grant {name}"))
                    .because("it has ended, was used, or was never made")
                    .remedy("ask its owner for a new one")
            })
    }

    pub(super) fn validate_read(&mut self, now: Time, peer: Incarnation, read: u64) {
        let serve = self.serves.values_mut().find(|serve| {
            serve
                .reader
                .is_some_and(|reader| reader.peer == peer && reader.read == read)
        });
        let mut live = false;
        if let Some(serve) = serve
            && serve.ending.is_none()
            && !serve.gate.is_closed()
            && let Some(reader) = serve.reader.as_mut()
        {
            reader.validated = true;
            live = true;
        }
        self.send(
            now,
            peer,
            Message::Validated {
                id: read,
                claim: false,
                live,
            },
        );
    }

    /// The link is done; how it ended, the reader says.
    pub(super) fn serve_transfer_over(&mut self, now: Time, id: HandleId) {
        if let Some(reader) = self.serves.get_mut(&id).and_then(|serve| serve.reader.as_mut()) {
            reader.transfer = None;
            let peer = reader.peer;
            if let Some(into) = reader.into {
                self.acknowledge_verdict(now, peer, into);
            }
        }
        self.look_at_serve_fence(now, id);
    }

    /// The reader says how its read has ended.
    pub(super) fn serve_ended(&mut self, now: Time, peer: Incarnation, name: GrantName, verdict: Verdict) {
        let Some(&id) = self.serve_names.get(&name) else { return };
        let Some(serve) = self.serves.get(&id) else { return };
        if serve.reader.is_none_or(|reader| reader.peer != peer) {
            return;
        }
        let bytes = serve.bytes;
        let result = match verdict {
            Verdict::Arrived => Ok(Outcome::Granted { bytes, message: None }),
            Verdict::Failed(error) => Err(error),
            Verdict::Unknown => Err(unknown("the read", "the reader does not know how it ended")),
        };
        if let Some(serve) = self.serves.get_mut(&id) {
            serve.gate.close();
            serve.decided = Some(result);
        }
        let limit = self.fence_limit([peer]);
        if self.fencing.insert(id) {
            self.timers.clear(TimerKey::Deadline(id));
            self.timers.set(TimerKey::Fence(id), now + limit);
        }
        self.look_at_serve_fence(now, id);
    }

    /// Ends a read grant: nothing is read any more. If someone was reading, the reader decides.
    pub(super) fn end_serve(&mut self, now: Time, id: HandleId, error: Error) {
        let Some(serve) = self.serves.get_mut(&id).filter(|serve| serve.ending.is_none()) else {
            return;
        };
        serve.gate.close();
        serve.ending = Some(error.clone());
        serve.since = now;
        let reader = serve.reader;
        self.fencing.insert(id);
        self.timers.clear(TimerKey::Deadline(id));
        let limit = self.fence_limit(reader.map(|reader| reader.peer));
        self.timers.set(TimerKey::Fence(id), now + limit);
        if let Some(reader) = reader {
            if let Some(transfer) = reader.transfer {
                self.stop_transfer(now, transfer, None);
            }
            let read = reader.read;
            self.send(now, reader.peer, Message::ReadRefused { read, error });
        }
        self.fences_changed = true;
    }

    /// The holder of a read grant will not read it. False if it is no read grant.
    pub(super) fn serve_unused(&mut self, now: Time, peer: Incarnation, name: GrantName, error: &Error) -> bool {
        let Some(&id) = self.serve_names.get(&name) else {
            return false;
        };
        let its = |serve: &Serve| serve.reader.is_none() && serve.holder.is_none_or(|holder| holder == peer);
        if self.serves.get(&id).is_some_and(its) {
            self.end_serve(now, id, error.clone());
        }
        true
    }

    pub(super) fn look_at_serve_fence(&mut self, now: Time, id: HandleId) {
        let Some(serve) = self.serves.get(&id) else { return };
        if let Some(result) = serve.decided.as_ref().filter(|_| serve.gate.fenced()) {
            let result = result.clone();
            self.finish_serve(now, id, result);
            return;
        }
        let Some(error) = &serve.ending else { return };
        if serve.reader.is_none() && serve.gate.fenced() {
            let error = error.clone();
            self.finish_serve(now, id, Err(error));
        }
    }

    pub(super) fn serve_not_fenced(&mut self, now: Time, id: HandleId) {
        let Some(serve) = self.serves.get(&id) else { return };
        let decided = serve.decided.as_ref().and_then(|result| result.as_ref().err());
        let Some(error) = decided.or(serve.ending.as_ref()).cloned().or_else(|| {
            serve.decided.as_ref().map(|_| {
                Error::new(ErrorKind::Internal, "the source blocks")
                    .because("a data thread or device did not let go of them")
            })
        }) else {
            return;
        };
        let error = if !serve.gate.fenced() {
            self.sources_quarantined += 1;
            self.quarantined_pools.insert(serve.pool);
            quarantined(&error)
        } else if serve.reader.is_some_and(|reader| reader.validated) {
            unknown("the read", "the reader did not say how it ended")
        } else {
            error
        };
        self.finish_serve(now, id, Err(error));
    }

    fn finish_serve(&mut self, now: Time, id: HandleId, result: Result<Outcome>) {
        let Some(serve) = self.serves.remove(&id) else { return };
        serve.gate.close();
        self.serve_names.remove(&serve.name);
        self.forget_timers(id);
        if let Some(reader) = serve.reader {
            match (reader.transfer, reader.into) {
                (Some(transfer), into) => self.stop_transfer(now, transfer, into),
                (None, Some(into)) => self.acknowledge_verdict(now, reader.peer, into),
                (None, None) => {}
            }
        }
        self.complete(id, result);
    }

    pub(super) fn serves_lost(&mut self, now: Time, peer: Incarnation, error: &Error) {
        let read: Vec<(HandleId, bool)> = self
            .serves
            .iter()
            .filter_map(|(id, serve)| Some((*id, serve.reader?)))
            .filter(|(_, reader)| reader.peer == peer)
            .map(|(id, reader)| (id, reader.validated))
            .collect();
        for (id, validated) in read {
            // A reader that was not told that its bytes are good has not taken them for arrived.
            let error = if validated && !mutants::is(Mutant::SayLostForUnknown) {
                unknown("the read", error.to_string())
            } else {
                error.clone()
            };
            if let Some(serve) = self.serves.get_mut(&id) {
                serve.reader = None;
                // What it ends with now counts, even if its end had begun.
                serve.ending = None;
            }
            self.end_serve(now, id, error);
        }
    }
}

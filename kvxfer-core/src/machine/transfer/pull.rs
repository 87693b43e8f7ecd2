//! Pulls: blocks of a peer's read grant into a slot of ours, validated before they count.

use super::*;

impl Machine {
    pub(in crate::machine) fn begin_pull(
        &mut self,
        now: Time,
        grant: &Grant,
        pool: PoolId,
        destination: Target,
        options: TransferOptions,
    ) -> Result<HandleId> {
        self.check_new_handle("a pull")?;
        if options.message.is_some() {
            return Err(
                Error::new(ErrorKind::InvalidArgument, "a user message with a pull").because("only a push carries one")
            );
        }
        if options.after.is_some() {
            return Err(Error::new(ErrorKind::InvalidArgument, "a pull after an event")
                .because("only what is sent can wait for one")
                .remedy("pull once the blocks may be written"));
        }
        let own = self.pool(pool)?;
        if !own.receives {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("pool {pool}"))
                .because("it is not registered for receiving")
                .remedy("register it with Role::Receive or Role::Both"));
        }
        if let Target::Selection { selection, .. } = &destination {
            own.layout.check(selection)?;
        }
        let bytes = destination.bytes(&own.layout)?;
        if bytes == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "a pull of 0 bytes").remedy("select at least one token"));
        }
        self.check_grant(grant, Access::Read)?;
        if self.spent.contains(&grant.name) {
            return Err(spent(grant.name));
        }
        let peer = grant.name.incarnation;
        self.check_room_on_session(peer)?;
        self.want_grant_owner(now, grant)?;
        self.spend(now, grant.name);
        let id = self.new_handle();
        let deadline = deadline_of(now, grant, &options);
        self.pulls.insert(
            id,
            Pull {
                peer,
                pool,
                grant: grant.clone(),
                target: Arc::new(destination),
                deadline,
                slot: None,
                transfer: None,
                bytes,
                arrived: false,
                validating: false,
                ending: None,
                since: now,
            },
        );
        self.timers.set(TimerKey::Deadline(id), deadline);
        if self.has_session(peer)
            && let Err(error) = self.start_pull(now, id)
        {
            // Nothing has begun: the grant is still good.
            self.pulls.remove(&id);
            self.spent.remove(&grant.name);
            self.forget_timers(id);
            return Err(error);
        }
        Ok(id)
    }

    pub(super) fn start_pull(&mut self, now: Time, id: HandleId) -> Result<()> {
        let Some(pull) = self.pulls.get(&id) else { return Ok(()) };
        let (peer, pool, name, target) = (pull.peer, pull.pool, pull.grant.name, pull.target.clone());
        let Some(layout) = self.grant_layout(peer, pull.grant.pool, pull.grant.geometry_hash)? else {
            return Ok(());
        };
        let own = self.pool(pool)?;
        let reads_itself = self.path_is_one_sided(peer);
        let part = if reads_itself {
            let blocks = Arc::new(pull.grant.target.clone());
            Some(SendPart {
                part: 0,
                extent: PartExtent::WHOLE,
                stream: target.stream(&own.layout, PartExtent::WHOLE)?,
                remote: Some(plan::source_stream(
                    &layout,
                    &blocks,
                    &own.layout,
                    &target,
                    PartExtent::WHOLE,
                )?),
            })
        } else {
            None
        };
        let slot = self.open_slot(SlotOwner::Pull(id), Some(peer), true, pool, target, None)?;
        if let Some(pull) = self.pulls.get_mut(&id) {
            pull.slot = Some(slot);
            pull.since = now;
        }
        match part {
            Some(part) => {
                let read = id.0;
                self.send(now, peer, Message::ReadDirect { read, grant: name });
                self.read_pull(now, id, slot, part);
            }
            None => self.ask_for_pull(now, id),
        }
        Ok(())
    }

    /// This endpoint's device reads the grant's blocks. No peer writes into the slot, or hears of it.
    fn read_pull(&mut self, now: Time, id: HandleId, slot: SlotKey, part: SendPart) {
        let Some(pull) = self.pulls.get(&id) else { return };
        let (peer, deadline) = (pull.peer, pull.deadline);
        let remote = RemoteSide {
            pool: pull.grant.pool,
            written: None,
        };
        let Some(own) = self.pools.get(&pull.pool) else { return };
        let regions = own.regions.clone();
        self.slot_has_no_writer(slot, true);
        let transfer = self.begin_transfer(peer, TransferOwner::PullRead(id), remote, |id| SendSpec {
            id,
            slot: slot.0,
            generation: slot.1,
            // The fence of what is read lies with its owner; what is written is fenced by the slot.
            gate: Gate::new(),
            regions,
            message: None,
            priority: 0,
            deadline: Some(deadline),
            checksum: false,
            remote: None,
        });
        if let Some(pull) = self.pulls.get_mut(&id) {
            pull.transfer = Some(transfer);
        }
        self.add_part(now, transfer, part);
    }

    /// The grant's owner sends its blocks into the slot.
    pub(in crate::machine) fn ask_for_pull(&mut self, now: Time, id: HandleId) {
        let Some(pull) = self.pulls.get(&id).filter(|pull| pull.ending.is_none()) else {
            return;
        };
        let (peer, grant) = (pull.peer, pull.grant.name);
        let (Some(slot), Some(own)) = (pull.slot, self.pools.get(&pull.pool)) else {
            return;
        };
        let into = Grant {
            name: self.grant_name(slot),
            address: self.address.clone(),
            access: Access::Write,
            pool: pull.pool,
            geometry_hash: own.layout.geometry_hash(),
            target: Target::clone(&pull.target),
            remaining_ms: pull.deadline.remaining_ms(now),
        };
        self.slot_has_no_writer(slot, false);
        let read = id.0;
        self.send(now, peer, Message::Read { read, grant, into });
    }

    /// The link is done with what was read.
    pub(in crate::machine) fn pull_read_over(&mut self, id: HandleId) {
        if let Some(pull) = self.pulls.get_mut(&id) {
            pull.transfer = None;
        }
    }

    pub(in crate::machine) fn pull_slot_arrived(&mut self, now: Time, id: HandleId) {
        let Some(pull) = self.pulls.get_mut(&id).filter(|pull| pull.ending.is_none()) else {
            return;
        };
        if pull.arrived {
            return;
        }
        pull.arrived = true;
        pull.validating = true;
        pull.since = now;
        let (peer, bytes) = (pull.peer, pull.bytes);
        let unasked = mutants::is(Mutant::SkipValidateOfReads) && self.path_is_one_sided(peer);
        if mutants::is(Mutant::SkipValidate) || unasked {
            self.finish_pull(now, id, Ok(Outcome::Transferred { bytes }));
            return;
        }
        self.send(
            now,
            peer,
            Message::Validate {
                id: id.0,
                claim: false,
                attempt: 0,
            },
        );
    }

    pub(in crate::machine) fn pull_validated(&mut self, now: Time, peer: Incarnation, read: u64, live: bool) {
        let id = HandleId(read);
        let Some(pull) = self.pulls.get(&id) else { return };
        if pull.peer != peer || pull.ending.is_some() || !pull.validating {
            return;
        }
        let bytes = pull.bytes;
        if live {
            self.finish_pull(now, id, Ok(Outcome::Transferred { bytes }));
        } else {
            let error = Error::new(ErrorKind::Retracted, "the source blocks")
                .because("they were taken back while they were read");
            self.end_pull(now, id, error);
        }
    }

    pub(in crate::machine) fn read_refused(&mut self, now: Time, peer: Incarnation, read: u64, error: Error) {
        if self.pulls.get(&HandleId(read)).is_some_and(|pull| pull.peer == peer) {
            self.end_pull(now, HandleId(read), error);
        }
    }

    /// Ends a pull. Bytes that the source has not called good do not count as arrived.
    pub(in crate::machine) fn end_pull(&mut self, now: Time, id: HandleId, error: Error) {
        let Some(pull) = self.pulls.get_mut(&id).filter(|pull| pull.ending.is_none()) else {
            return;
        };
        let (slot, peer) = (pull.slot, pull.peer);
        let error = if slot.is_some() { maybe_written(&error) } else { error };
        pull.since = now;
        pull.ending = Some(Ending {
            error,
            links: Vec::new(),
        });
        let transfer = pull.transfer.take();
        if let Some(slot) = slot {
            self.close_slot(slot);
        }
        if let Some(transfer) = transfer {
            self.stop_transfer(now, transfer, None);
        }
        self.fencing.insert(id);
        self.timers.clear(TimerKey::Deadline(id));
        let limit = self.fence_limit([peer]);
        self.timers.set(TimerKey::Fence(id), now + limit);
        self.fences_changed = true;
    }

    pub(in crate::machine) fn look_at_pull_fence(&mut self, now: Time, id: HandleId) {
        let Some(pull) = self.pulls.get(&id) else { return };
        let Some(ending) = &pull.ending else { return };
        let fenced = pull
            .slot
            .is_none_or(|slot| self.slot_is_fenced(slot) && ending.links.iter().all(|link| self.link_is_closed(*link)));
        if fenced {
            let error = ending.error.clone();
            self.finish_pull(now, id, Err(error));
        }
    }

    pub(in crate::machine) fn pull_not_fenced(&mut self, now: Time, id: HandleId) {
        let Some(pull) = self.pulls.get(&id) else { return };
        let Some(ending) = &pull.ending else { return };
        let error = quarantined(&ending.error);
        if let Some(slot) = pull.slot {
            self.quarantine_slot(now, slot, &error);
        }
        self.finish_pull(now, id, Err(error));
    }

    pub(super) fn finish_pull(&mut self, now: Time, id: HandleId, result: Result<Outcome>) {
        let Some(pull) = self.pulls.remove(&id) else { return };
        if let Some(transfer) = pull.transfer {
            self.stop_transfer(now, transfer, None);
        }
        self.forget_timers(id);
        let verdict = match &result {
            Ok(_) => Verdict::Arrived,
            Err(error) => Verdict::Failed(error.clone()),
        };
        let unused = result.as_ref().err().cloned();
        self.complete(id, result);
        let grant = pull.grant.name;
        match (pull.slot, unused) {
            (Some(slot), _) => {
                self.end_slot(now, slot, verdict.clone());
                self.send(now, pull.peer, Message::Verdict { grant, verdict });
            }
            (None, Some(error)) => self.tell_unused(now, pull.peer, grant, error),
            (None, None) => {}
        }
    }

    pub(in crate::machine) fn pulls_lost(&mut self, now: Time, peer: Incarnation, error: &Error) {
        let link = self.closing_link(peer);
        let pulls: Vec<HandleId> = self
            .pulls
            .iter()
            .filter(|(_, pull)| pull.peer == peer)
            .map(|(id, _)| *id)
            .collect();
        for id in pulls {
            self.end_pull(now, id, error.clone());
            if let Some(ending) = self.pulls.get_mut(&id).and_then(|pull| pull.ending.as_mut()) {
                ending.links.extend(link);
            }
        }
    }
}

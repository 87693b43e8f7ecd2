//! Decode applications: claims opened and filled; and applications of both kinds that change their minds.

use std::time::Duration;

use kvxfer_core::ErrorKind;
use kvxfer_core::layout::Selection;
use kvxfer_core::machine::{ClaimOptions, HandleId};

use super::coverage::Point;
use super::ledger::{ClaimRecord, Serial, Shape, What};
use super::workload::{AppEvent, Early, Retract};
use super::world::{Event, NodeIndex, World};

impl World {
    pub(crate) fn open_claim(&mut self, node: NodeIndex, request: usize, set: usize, member: usize) {
        let this = &self.workload.requests[request];
        let (key, addresses, pull, deadline) = (this.key.clone(), this.addresses.clone(), this.pull, this.deadline);
        let (id, members) = (this.sets[set].id, this.sets[set].nodes.len());
        let options = ClaimOptions {
            set: id,
            member: member as u16,
            members: members as u16,
            deadline,
            pull,
        };
        let Some(pool) = self.pool_id(node, 0) else {
            return;
        };
        let sources = addresses
            .iter()
            .filter_map(|address| address.incarnation)
            .collect::<Vec<_>>();
        let stale = sources.iter().any(|incarnation| self.node_of(*incarnation).is_none());
        let offered = self
            .ledger
            .iter()
            .any(|record| record.is_open() && matches!(&record.what, What::Offer(offer) if offer.request == request));
        // Known before the call: its first messages leave within it.
        let what = What::Claim(ClaimRecord {
            request,
            key: key.clone(),
            set: id,
            member: member as u16,
            sources,
            attempts_told: Default::default(),
            pull,
            filled: false,
            stale_at_open: stale,
        });
        let limit = deadline.unwrap_or(
            self.profile
                .machine
                .hold_max
                .max(self.profile.machine.unmatched_deadline),
        );
        let serial = self.record(
            node,
            0,
            HandleId(u64::MAX),
            what,
            Shape::Selection(Selection::default()),
            limit,
        );
        let opened = self.with_machine(node, |machine, now| machine.claim(now, &key, pool, &addresses, options));
        match opened {
            Some(Ok(handle)) => {
                self.name_record(serial, handle);
                self.coverage
                    .reach(if offered { Point::ClaimLate } else { Point::ClaimEarly });
                self.trace(|| format!("node {node} claims request {request} as #{serial}"));
                let at = self.now + self.step_delay();
                self.app_at(at, node, AppEvent::FillClaim { serial, tries: 0 });
                self.meddle(node, serial);
            }
            Some(Err(error)) => {
                self.trace(|| format!("node {node} cannot claim request {request}: {error}"));
                self.ledger[serial as usize].ended = Some((self.now, Err(error.clone())));
                self.ledger[serial as usize].released = true;
                self.workload.requests[request].disturbed = true;
                match error.kind() {
                    ErrorKind::StalePeer if stale => self.coverage.reach(Point::StaleAddress),
                    kind => self.refused(node, kind, &error),
                }
            }
            None => {}
        }
    }

    pub(crate) fn fill_claim(&mut self, node: NodeIndex, serial: Serial, tries: u32) {
        let record = &self.ledger[serial as usize];
        let What::Claim(claim) = &record.what else {
            return;
        };
        if !record.is_open() || record.ending {
            return;
        }
        let request = claim.request;
        let (tokens, set) = (self.workload.requests[request].tokens, claim.set);
        let held = self.workload.requests[request].held_of(set);
        let Some(selection) = self.allocate_selection(node, record.pool, held..tokens, true) else {
            self.no_blocks(
                node,
                serial,
                AppEvent::FillClaim {
                    serial,
                    tries: tries + 1,
                },
                tries,
            );
            return;
        };
        for (group, chosen) in selection.groups.iter().enumerate() {
            self.give_blocks(serial, group, &chosen.blocks);
        }
        let record = &mut self.ledger[serial as usize];
        record.shape = Shape::Selection(selection.clone());
        let handle = record.handle;
        if let What::Claim(claim) = &mut record.what {
            claim.filled = true;
        }
        match self.with_machine(node, |machine, now| machine.claim_into(now, handle, selection)) {
            Some(Err(error)) if error.kind() == ErrorKind::Closed => {
                // It is ending; nothing was granted.
                self.release_blocks(serial);
            }
            Some(Err(error)) => self.fail("internal", format!("a claim's blocks are refused: {error}")),
            _ => {}
        }
    }

    /// The application may change its mind.
    pub(crate) fn meddle(&mut self, node: NodeIndex, serial: Serial) {
        if !self.rng.percent(self.profile.meddling_percent) {
            return;
        }
        let how = match (&self.ledger[serial as usize].what, self.rng.below(3)) {
            (What::Offer(_), 0 | 1) => Early::Retract,
            (What::Claim(_), 0) => Early::Decline,
            _ => Early::Cancel,
        };
        let span = *self.rng.pick(&[500u64, 8_000, 100_000]).unwrap_or(&8_000);
        let at = self.now + Duration::from_micros(self.rng.below(span));
        self.app_at(at, node, AppEvent::EndEarly { serial, how });
    }

    pub(crate) fn disturb(&mut self, serial: Serial) {
        let request = match &self.ledger[serial as usize].what {
            What::Offer(offer) => offer.request,
            What::Claim(claim) => claim.request,
            _ => return,
        };
        self.workload.requests[request].disturbed = true;
    }

    pub(crate) fn end_early(&mut self, node: NodeIndex, serial: Serial, how: Early) {
        if !self.ledger[serial as usize].is_open() || self.ledger[serial as usize].ending {
            return;
        }
        self.disturb(serial);
        let in_flight = self.has_bytes_in_flight(serial);
        let record = &mut self.ledger[serial as usize];
        let handle = record.handle;
        let filled = matches!(&record.what, What::Claim(claim) if claim.filled);
        let how = if how == Early::Decline && filled {
            Early::Cancel
        } else {
            how
        };
        record.ending = true;
        // From now on the end must come within the fence limit.
        let limit = self.now + self.profile.fence_limit() + Duration::from_millis(1);
        self.trace(|| format!("node {node} ends #{serial} early: {how:?}"));
        let source = self.ledger[serial as usize].is_source();
        match how {
            Early::Cancel => {
                if in_flight {
                    self.coverage.reach(if source {
                        Point::SourceCancelInFlight
                    } else {
                        Point::CancelInFlight
                    });
                }
                self.with_machine(node, |machine, now| machine.cancel(now, handle));
                if self.is_held(serial) {
                    self.coverage.reach(Point::PushEndedHeld);
                    if self.ledger[serial as usize].ended.is_none() {
                        let words = format!("{} is cancelled while it is held, and lasts", self.describe(serial));
                        self.fail("8 alive", words);
                    }
                }
            }
            Early::Decline => {
                if let Some(Err(error)) = self.with_machine(node, |machine, now| machine.decline(now, handle)) {
                    self.closed_or_fail("decline", &error);
                }
            }
            Early::Retract => self.retract(node, serial, handle, in_flight),
        }
        let record = &mut self.ledger[serial as usize];
        if record.ended.is_none() && !record.is_source() {
            record.must_end = record.must_end.min(limit);
            self.queue
                .push(limit, Event::Check(super::world::Check::MustHaveEnded { serial }));
        }
    }

    pub(crate) fn closed_or_fail(&mut self, call: &str, error: &kvxfer_core::Error) {
        if error.kind() != ErrorKind::Closed {
            self.fail("internal", format!("{call} is refused: {error}"));
        }
    }

    pub(crate) fn retract(&mut self, node: NodeIndex, serial: Serial, handle: HandleId, in_flight: bool) {
        let blocks: Vec<u32> = self.ledger[serial as usize].blocks.first().cloned().unwrap_or_default();
        if blocks.is_empty() {
            // Nothing can be taken back yet.
            self.with_machine(node, |machine, now| machine.cancel(now, handle));
            return;
        }
        match self.with_machine(node, |machine, now| machine.retract(now, handle, &blocks)) {
            Some(Ok(gate)) => {
                if in_flight {
                    self.coverage.reach(Point::RetractInFlight);
                }
                if let What::Offer(offer) = &mut self.ledger[serial as usize].what {
                    offer.retracted = true;
                }
                self.take_back_behind(Retract {
                    node,
                    serial,
                    gates: vec![gate],
                    blocks: None,
                });
            }
            Some(Err(error)) => self.closed_or_fail("retract", &error),
            None => {}
        }
    }
}

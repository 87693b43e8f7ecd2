//! Kernels of the simulated engines: releases and pushes of bytes that are not computed yet, and the events that say
//! when they are; late, failed, or never.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use kvxfer_core::machine::{EventId, Machine};
use kvxfer_core::{Error, ErrorKind, Result, Time};

use super::coverage::Point;
use super::ledger::{Serial, Shape, What};
use super::memory::descriptor_runs;
use super::workload::AppEvent;
use super::world::{Life, NodeIndex, World};
use crate::pattern;

/// What waits for what.
#[derive(Default)]
pub(crate) struct Events {
    count: u32,
    waiting: BTreeMap<u32, BTreeSet<Serial>>,
    /// The event that each process recorded last, while it has not happened.
    latest: BTreeMap<(NodeIndex, Life), u32>,
    /// Offers that had something withheld.
    withheld: BTreeSet<Serial>,
    /// Pushes whose event has not happened.
    held: BTreeSet<Serial>,
}

/// A stretch of a pool: region, offset, length.
type Stretch = (usize, usize, usize);

impl World {
    /// Releases what is not computed yet, behind an event: the bytes are sealed until it happens.
    pub(crate) fn after_event(
        &mut self,
        node: NodeIndex,
        serial: Serial,
        tokens: Range<u32>,
        layers: Range<u16>,
        release: impl FnOnce(&mut Machine, Time, EventId) -> Result<()>,
    ) -> Option<Result<()>> {
        let event = self.record_event(node);
        let sealed = self.seal(serial, event, tokens, layers);
        let result = self.with_machine(node, |machine, now| release(machine, now, EventId(event.into())));
        match &result {
            Some(Ok(())) => {
                self.coverage.reach(Point::Withheld);
                self.workload.events.withheld.insert(serial);
                let waiting = self.workload.events.waiting.entry(event).or_default();
                waiting.insert(serial);
                if waiting.len() > 1 {
                    self.coverage.reach(Point::EventShared);
                }
            }
            // It was not taken: the call comes again, with another event.
            _ => self.fill_sealed(serial, &sealed, 0),
        }
        result
    }

    /// The source of a push is not computed yet.
    pub(crate) fn hold_push(&mut self, node: NodeIndex, serial: Serial) -> EventId {
        let event = self.record_event(node);
        self.seal(serial, event, 0..u32::MAX, 0..u16::MAX);
        self.coverage.reach(Point::PushHeld);
        self.workload.events.held.insert(serial);
        self.workload.events.waiting.entry(event).or_default().insert(serial);
        EventId(event.into())
    }

    pub(crate) fn is_held(&self, serial: Serial) -> bool {
        self.workload.events.held.contains(&serial)
    }

    pub(crate) fn had_withheld(&self, serial: Serial) -> bool {
        self.workload.events.withheld.contains(&serial)
    }

    /// The engine records an event, or uses the one of its last step; when it happens is drawn here.
    fn record_event(&mut self, node: NodeIndex) -> u32 {
        let place = (node, self.nodes[node].life);
        if let Some(latest) = self.workload.events.latest.get(&place).copied()
            && self.rng.percent(30)
        {
            return latest;
        }
        self.workload.events.count += 1;
        let event = self.workload.events.count;
        self.workload.events.latest.insert(place, event);
        let (fail, never) = self.profile.lost_event_permille;
        let fate = self.rng.below(1_000);
        if fate < never {
            self.coverage.reach(Point::EventNever);
            // Nothing later in its stream happens either: the next step records in another.
            self.workload.events.latest.remove(&place);
            return event;
        }
        let span = *self.rng.pick(&[200u64, 5_000, 200_000]).unwrap_or(&5_000);
        let at = self.now + Duration::from_micros(self.rng.below(span));
        let fails = fate < never + fail;
        self.app_at(at, node, AppEvent::EventHappens { event, fails });
        event
    }

    pub(crate) fn event_happens(&mut self, node: NodeIndex, event: u32, fails: bool) {
        let events = &mut self.workload.events;
        events.latest.retain(|_, latest| *latest != event);
        let waiting = events.waiting.remove(&event).unwrap_or_default();
        self.trace(|| format!("node {node} event {event} happens (fails: {fails}), awaited by {waiting:?}"));
        for serial in &waiting {
            self.workload.events.held.remove(serial);
            if !self.ledger[*serial as usize].is_open() || !self.unseal(*serial, event, fails) {
                self.coverage.reach(Point::EventLate);
            }
        }
        let result = if fails {
            self.coverage.reach(Point::EventFailed);
            Err(Error::new(ErrorKind::Transport, "a kernel").because("it failed"))
        } else {
            Ok(())
        };
        self.with_machine(node, |machine, now| {
            machine.event_happened(now, EventId(event.into()), &result);
        });
    }

    /// Marks what of a source nobody may read before the event. What is released without one, or behind another, stays.
    fn seal(&mut self, serial: Serial, event: u32, tokens: Range<u32>, layers: Range<u16>) -> Vec<Stretch> {
        let record = &self.ledger[serial as usize];
        let attempt = match &record.what {
            What::Offer(offer) => offer.attempt,
            _ => 0,
        };
        let (node, pool, shape) = (record.node, record.pool, record.shape.clone());
        let stamp = self.stamp(serial, attempt);
        let mut stretches: Vec<Stretch> = Vec::new();
        if let Some(body) = self.nodes[node].body.as_ref() {
            let pool = &body.pools[pool];
            match &shape {
                Shape::Selection(selection) => {
                    pattern::for_each_run(&pool.layout, selection, tokens.clone(), layers, |run| {
                        let (region, offset) = (run.region as usize, run.offset as usize);
                        let state = pool.layout.layers()[run.layer as usize].as_str() == "layer.state";
                        let released = pool.stamp[region][offset] == stamp || pool.sealed[region][offset] != 0;
                        // States go with the last release of all, and are written by every step before.
                        let meant = if state { tokens.end == u32::MAX } else { !released };
                        if meant {
                            stretches.push((region, offset, run.length as usize));
                        }
                    });
                }
                Shape::Descriptors(pieces) => {
                    let runs = descriptor_runs(&pool.layout, pieces).into_iter();
                    stretches.extend(runs.map(|(region, offset, length)| (region, offset as usize, length as usize)));
                }
            }
        }
        self.fill_sealed(serial, &stretches, event);
        stretches
    }

    fn fill_sealed(&mut self, serial: Serial, stretches: &[Stretch], event: u32) {
        let (node, pool) = (self.ledger[serial as usize].node, self.ledger[serial as usize].pool);
        if let Some(body) = self.nodes[node].body.as_mut() {
            for &(region, offset, length) in stretches {
                body.pools[pool].sealed[region][offset..offset + length].fill(event);
                body.pools[pool].stamp[region][offset..offset + length].fill(0);
            }
        }
    }

    /// The kernel has written what the event guards, unless it failed. False if nothing of it is the handle's any more.
    fn unseal(&mut self, serial: Serial, event: u32, fails: bool) -> bool {
        let record = &self.ledger[serial as usize];
        let Some(body) = self.nodes[record.node].body.as_ref() else {
            return false;
        };
        let pool = &body.pools[record.pool];
        let sealed = record.blocks.iter().enumerate().any(|(group, blocks)| {
            let mut runs = blocks.iter().flat_map(|block| pool.block_runs(group, *block));
            runs.any(|(region, offset, length)| pool.sealed[region][offset..offset + length].contains(&event))
        });
        if sealed && !fails {
            self.write_sealed(serial, event);
        }
        sealed
    }
}

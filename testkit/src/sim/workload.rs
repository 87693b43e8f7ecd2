//! The applications of the simulated endpoints: prefill and decode engines that hand requests over, change their
//! minds, and give freed blocks to the next request at once.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::flow::Gate;
use kvxfer_core::layout::Selection;
use kvxfer_core::machine::{ClaimOptions, HandleId, Notice, OfferOptions};
use kvxfer_core::wire::{EndpointAddress, Grant};
use kvxfer_core::{ErrorKind, PoolId, Time};

use super::coverage::Point;
use super::ledger::{ClaimRecord, OfferRecord, Record, Serial, Shape, What};
use super::world::{Event, NodeIndex, World};

/// How often something that found no room is tried again, and for how long.
const RETRY: Duration = Duration::from_millis(7);
const RETRIES_MAX: u32 = 60;

/// What an application does at a time.
#[derive(Debug)]
pub(crate) enum AppEvent {
    OpenOffer { request: usize, source: usize, tries: u32 },
    OfferStep { serial: Serial, step: usize, tries: u32 },
    OpenClaim { request: usize, set: usize, member: usize },
    FillClaim { serial: Serial, tries: u32 },
    EndEarly { serial: Serial, how: Early },
    Release { serial: Serial },
    OpenGrant { raw: usize },
    UseGrant { raw: usize, grant: Box<Grant>, tries: u32 },
    AddPool,
    RemovePool { tries: u32 },
    Drain,
}

/// How an application ends a handle before its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Early {
    Cancel,
    Decline,
    Retract,
}

/// All requests and raw transfers of a run.
#[derive(Default)]
pub(crate) struct Workload {
    pub(crate) requests: Vec<Request>,
    pub(crate) raws: Vec<super::raw::Raw>,
    scripts: Vec<Vec<Step>>,
    script_of: BTreeMap<Serial, usize>,
    /// Source blocks whose owner wants them back, and that wait for gates to be fenced.
    retracts: Vec<Retract>,
}

/// Blocks taken back from a source that may still be read.
struct Retract {
    node: NodeIndex,
    serial: Serial,
    gates: Vec<Arc<Gate>>,
    /// These, or all that the handle has.
    blocks: Option<Vec<Vec<u32>>>,
}

/// One request: KV made by the sources, wanted by sets of destinations.
pub(crate) struct Request {
    pub(crate) number: usize,
    pub(crate) key: Vec<u8>,
    pub(crate) tokens: u32,
    pub(crate) addresses: Vec<EndpointAddress>,
    pub(crate) readers: u16,
    pub(crate) sets: Vec<Set>,
    /// Claimed and pulled, not pushed.
    pub(crate) pull: bool,
    pub(crate) deadline: Option<Duration>,
    pub(crate) priority: u8,
    pub(crate) checksum: bool,
    /// Offers and claims that were ended by their applications, or could not be: not all must arrive.
    pub(crate) disturbed: bool,
}

/// One reader of a request.
pub(crate) struct Set {
    id: u128,
    nodes: Vec<NodeIndex>,
    held: u32,
}

impl Request {
    /// Tokens that this reader had already.
    pub(crate) fn held_of(&self, set: u128) -> u32 {
        self.sets.iter().find(|own| own.id == set).map_or(0, |own| own.held)
    }
}

/// What an offer's application does, in order.
#[derive(Debug, Clone)]
enum Step {
    Append(Range<u32>),
    Ready { tokens: Range<u32>, layers: Range<u16> },
    Restart,
    Finish(u32),
}

impl World {
    /// Lays out all requests and raw transfers over the run's span.
    pub(crate) fn plan_workload(&mut self) {
        for request in 0..self.profile.requests {
            let at = self.now + self.within_span();
            // Addresses are learned when a request is made, and may be stale when they are used.
            let addresses = (0..self.profile.sources)
                .filter_map(|node| self.nodes[node].body.as_ref().map(|body| body.address.clone()))
                .collect();
            let made = self.make_request(request, addresses);
            self.workload.requests.push(made);
            self.schedule_request(request, at);
        }
        for raw in 0..self.profile.raw_transfers {
            let at = self.now + self.within_span();
            let made = self.make_raw(None);
            let node = made.owner;
            self.workload.raws.push(made);
            self.app_at(at, node, AppEvent::OpenGrant { raw });
        }
        for _ in 0..self.profile.pool_changes {
            let node = self.rng.below(self.nodes.len() as u64) as usize;
            let at = self.now + self.within_span();
            self.app_at(at, node, AppEvent::AddPool);
        }
        for _ in 0..self.profile.drains {
            let node = self.rng.below(self.nodes.len() as u64) as usize;
            let at = self.now + self.within_span();
            self.app_at(at, node, AppEvent::Drain);
        }
    }

    pub(crate) fn within_span(&mut self) -> Duration {
        Duration::from_micros(self.rng.below(self.profile.span.as_micros() as u64))
    }

    pub(crate) fn app_at(&mut self, at: Time, node: NodeIndex, event: AppEvent) {
        let life = self.nodes[node].life;
        self.queue.push(at, Event::App { node, life, event });
    }

    fn make_request(&mut self, index: usize, addresses: Vec<EndpointAddress>) -> Request {
        let reuse = self.rng.percent(25);
        let key = match self.workload.requests.last() {
            Some(previous) if reuse => {
                self.coverage.reach(Point::KeyReused);
                previous.key.clone()
            }
            _ => format!("request-{index}").into_bytes(),
        };
        let tokens = self.rng.within(1..21) as u32;
        let mut groups: Vec<Vec<NodeIndex>> = Vec::new();
        let mut first = self.profile.sources;
        for size in &self.profile.groups {
            groups.push((first..first + size).collect());
            first += size;
        }
        self.rng.shuffle(&mut groups);
        let all = self.rng.percent(40);
        let mut sets: Vec<Set> = Vec::new();
        let readers = if all { groups.len() } else { 1 };
        for nodes in groups.into_iter().take(readers) {
            let held = if self.rng.percent(20) {
                self.rng.below(u64::from(tokens)) as u32
            } else {
                0
            };
            sets.push(Set {
                id: self.rng.next_u128(),
                nodes,
                held,
            });
        }
        let meddle = self.profile.meddling_percent;
        if self.rng.percent(meddle / 6) {
            // One reader more than is served.
            let nodes = sets[0].nodes.clone();
            sets.push(Set {
                id: self.rng.next_u128(),
                nodes,
                held: 0,
            });
        }
        Request {
            number: index,
            key,
            tokens,
            addresses,
            readers: readers as u16,
            disturbed: sets.len() > readers,
            sets,
            pull: self.rng.percent(35),
            deadline: (self.profile.short_deadlines && self.rng.percent(60))
                .then(|| Duration::from_millis(self.rng.within(1..1_500))),
            priority: self.rng.below(3) as u8,
            checksum: self.profile.corrupt_permyriad > 0 || self.rng.percent(20),
        }
    }

    fn schedule_request(&mut self, request: usize, at: Time) {
        let spread = *self.rng.pick(&[200u64, 5_000, 400_000]).unwrap_or(&5_000);
        for source in 0..self.workload.requests[request].addresses.len() {
            let at = at + Duration::from_micros(self.rng.below(spread));
            self.app_at(
                at,
                source,
                AppEvent::OpenOffer {
                    request,
                    source,
                    tries: 0,
                },
            );
        }
        for set in 0..self.workload.requests[request].sets.len() {
            for member in 0..self.workload.requests[request].sets[set].nodes.len() {
                let node = self.workload.requests[request].sets[set].nodes[member];
                let at = at + Duration::from_micros(self.rng.below(spread));
                self.app_at(at, node, AppEvent::OpenClaim { request, set, member });
            }
        }
    }

    /// An application acts.
    pub(crate) fn app(&mut self, node: NodeIndex, event: AppEvent) {
        let closing = self.nodes[node].body.as_ref().is_none_or(|body| body.closing);
        if closing && !matches!(event, AppEvent::Release { .. }) {
            return;
        }
        match event {
            AppEvent::OpenOffer { request, source, tries } => self.open_offer(node, request, source, tries),
            AppEvent::OfferStep { serial, step, tries } => self.offer_step(node, serial, step, tries),
            AppEvent::OpenClaim { request, set, member } => self.open_claim(node, request, set, member),
            AppEvent::FillClaim { serial, tries } => self.fill_claim(node, serial, tries),
            AppEvent::EndEarly { serial, how } => self.end_early(node, serial, how),
            AppEvent::Release { serial } => self.release_after_use(serial),
            AppEvent::OpenGrant { raw } => self.open_grant(node, raw),
            AppEvent::UseGrant { raw, grant, tries } => self.use_grant(node, raw, *grant, tries),
            AppEvent::AddPool => self.add_pool(node),
            AppEvent::RemovePool { tries } => self.remove_pool(node, tries),
            AppEvent::Drain => self.drain(node),
        }
    }

    fn open_offer(&mut self, node: NodeIndex, request: usize, source: usize, tries: u32) {
        let this = &self.workload.requests[request];
        let (key, tokens) = (this.key.clone(), this.tokens);
        let options = OfferOptions {
            readers: this.readers,
            deadline: this.deadline,
            priority: this.priority,
            checksum: this.checksum,
        };
        let live = self.ledger.iter().any(|record| {
            record.node == node
                && record.is_open()
                && record.life == self.nodes[node].life
                && matches!(&record.what, What::Offer(offer) if offer.key == key)
        });
        let Some(pool) = self.pool_id(node, 0) else {
            return;
        };
        let opened = self.with_machine(node, |machine, now| machine.offer(now, &key, pool, options));
        match opened {
            Some(Ok(handle)) => {
                if live {
                    self.fail("6 no stale peer", format!("node {node} has two live offers of one key"));
                    return;
                }
                let incarnation = match self.nodes[node].body.as_ref() {
                    Some(body) => body.incarnation,
                    None => return,
                };
                let what = What::Offer(OfferRecord {
                    request,
                    key,
                    incarnation,
                    attempt: 1,
                    readers: self.workload.requests[request].readers,
                    finished: false,
                    retracted: false,
                });
                let deadline = self.workload.requests[request].deadline;
                let limit = deadline.unwrap_or(self.profile.machine.hold_max + self.profile.machine.unmatched_deadline);
                let serial = self.record(node, 0, handle, what, Shape::Selection(Selection::default()), limit);
                self.write_script(serial, tokens);
                self.trace(|| format!("node {node} offers request {request} as #{serial}"));
                let at = self.now + self.step_delay();
                self.app_at(
                    at,
                    node,
                    AppEvent::OfferStep {
                        serial,
                        step: 0,
                        tries: 0,
                    },
                );
                self.meddle(node, serial);
            }
            Some(Err(error)) => {
                self.trace(|| format!("node {node} cannot offer request {request}: {error}"));
                match error.kind() {
                    ErrorKind::DuplicateKey if live => self.coverage.reach(Point::DuplicateKey),
                    ErrorKind::DuplicateKey => {
                        self.fail(
                            "internal",
                            format!("node {node}: {error}, and no live offer has that key"),
                        );
                        return;
                    }
                    kind => self.refused(node, kind, &error),
                }
                if tries < RETRIES_MAX {
                    let at = self.now + RETRY;
                    let tries = tries + 1;
                    self.app_at(at, node, AppEvent::OpenOffer { request, source, tries });
                } else {
                    self.workload.requests[request].disturbed = true;
                }
            }
            None => {}
        }
    }

    /// A limit may answer `Busy`, a drained endpoint `Closed`; anything else is not expected of an honest call.
    pub(crate) fn refused(&mut self, node: NodeIndex, kind: ErrorKind, error: &kvxfer_core::Error) {
        let draining = self.nodes[node].body.as_ref().is_some_and(|body| body.draining);
        match kind {
            ErrorKind::Busy if self.profile.tight_limits => self.coverage.reach(Point::Busy),
            ErrorKind::Closed if draining => {}
            _ => self.fail("internal", format!("node {node} refuses an honest call: {error}")),
        }
    }

    fn write_script(&mut self, serial: Serial, tokens: u32) {
        let (node, pool) = (self.ledger[serial as usize].node, self.ledger[serial as usize].pool);
        let Some(body) = self.nodes[node].body.as_ref() else {
            return;
        };
        let layout = Arc::clone(&body.pools[pool].layout);
        let per_block = layout.cache_groups()[0].geometry.tokens_per_block;
        let layers = layout.layers().len() as u16;
        let mut steps = Vec::new();
        let restart_percent = self.profile.meddling_percent / 4;
        let rounds = if self.rng.percent(restart_percent) { 2 } else { 1 };
        for round in 0..rounds {
            let last_round = round + 1 == rounds;
            let mut start = 0;
            while start < tokens {
                let blocks = 1 + self.rng.below(3) as u32;
                let end = (start + blocks * per_block).min(tokens);
                steps.push(Step::Append(start..end));
                // The last tokens of a half-full block go with `finish`.
                if end % per_block == 0 && self.rng.percent(75) {
                    let mut cuts: Vec<Range<u16>> = if layers > 1 && self.rng.percent(50) {
                        let cut = 1 + self.rng.below(u64::from(layers) - 1) as u16;
                        vec![0..cut, cut..layers]
                    } else {
                        vec![0..layers]
                    };
                    self.rng.shuffle(&mut cuts);
                    for layers in cuts {
                        steps.push(Step::Ready {
                            tokens: start..end,
                            layers,
                        });
                    }
                }
                start = end;
            }
            steps.push(if last_round {
                Step::Finish(tokens)
            } else {
                Step::Restart
            });
        }
        if rounds == 1 && self.rng.percent(40) {
            // Parts in any order, once the blocks are there.
            let (mut ready, mut rest): (Vec<Step>, Vec<Step>) =
                steps.into_iter().partition(|step| matches!(step, Step::Ready { .. }));
            let finish = rest.split_off(rest.len() - 1);
            self.rng.shuffle(&mut ready);
            rest.extend(ready);
            rest.extend(finish);
            steps = rest;
        }
        self.workload.script_of.insert(serial, self.workload.scripts.len());
        self.workload.scripts.push(steps);
    }

    fn step_delay(&mut self) -> Duration {
        let span = *self.rng.pick(&[30u64, 1_000, 30_000]).unwrap_or(&1_000);
        Duration::from_micros(self.rng.below(span))
    }

    fn offer_step(&mut self, node: NodeIndex, serial: Serial, step: usize, tries: u32) {
        if !self.ledger[serial as usize].is_open() || self.ledger[serial as usize].ending {
            return;
        }
        let script = self.workload.script_of[&serial];
        let Some(what) = self.workload.scripts[script].get(step).cloned() else {
            return;
        };
        let handle = self.ledger[serial as usize].handle;
        let outcome = match what {
            Step::Append(tokens) => match self.append(node, serial, handle, tokens) {
                Some(outcome) => outcome,
                None => {
                    self.no_blocks(
                        node,
                        serial,
                        AppEvent::OfferStep {
                            serial,
                            step,
                            tries: tries + 1,
                        },
                        tries,
                    );
                    return;
                }
            },
            Step::Ready { tokens, layers } => {
                self.write_source(serial, tokens.clone(), layers.clone());
                let tokens = (tokens.start, tokens.end);
                self.with_machine(node, |machine, now| {
                    machine.ready(now, handle, tokens, (layers.start, layers.end))
                })
            }
            Step::Restart => self.restart_offer(node, serial, handle),
            Step::Finish(tokens) => {
                self.write_source(serial, 0..u32::MAX, 0..u16::MAX);
                if let What::Offer(offer) = &mut self.ledger[serial as usize].what {
                    offer.finished = true;
                }
                self.with_machine(node, |machine, now| machine.finish(now, handle, tokens))
            }
        };
        match outcome {
            Some(Ok(())) => {
                let at = self.now + self.step_delay();
                let step = step + 1;
                self.app_at(at, node, AppEvent::OfferStep { serial, step, tries: 0 });
            }
            // It is ending, for a reason that its completion will say.
            Some(Err(error)) if error.kind() == ErrorKind::Closed => {}
            Some(Err(error)) if error.kind() == ErrorKind::Busy && self.profile.tight_limits => {
                self.coverage.reach(Point::Busy);
                self.no_blocks(
                    node,
                    serial,
                    AppEvent::OfferStep {
                        serial,
                        step,
                        tries: tries + 1,
                    },
                    tries,
                );
            }
            Some(Err(error)) => {
                let who = self.describe(serial);
                self.fail("internal", format!("step {step} of {who} is refused: {error}"));
            }
            None => {}
        }
    }

    fn append(
        &mut self,
        node: NodeIndex,
        serial: Serial,
        handle: HandleId,
        tokens: Range<u32>,
    ) -> Option<Option<kvxfer_core::Result<()>>> {
        let states = matches!(&self.ledger[serial as usize].shape, Shape::Selection(whole) if whole.groups.is_empty());
        let selection = self.allocate_selection(node, self.ledger[serial as usize].pool, tokens, states)?;
        for (group, chosen) in selection.groups.iter().enumerate() {
            self.give_blocks(serial, group, &chosen.blocks);
        }
        if let Shape::Selection(whole) = &mut self.ledger[serial as usize].shape {
            if whole.groups.is_empty() {
                whole.clone_from(&selection);
            } else {
                for (whole, more) in whole.groups.iter_mut().zip(&selection.groups) {
                    whole.blocks.extend_from_slice(&more.blocks);
                    whole.token_end = whole.token_end.max(more.token_end);
                }
            }
        }
        Some(self.with_machine(node, |machine, now| machine.append(now, handle, &selection)))
    }

    /// There are no blocks now: later, or never.
    fn no_blocks(&mut self, node: NodeIndex, serial: Serial, again: AppEvent, tries: u32) {
        if tries < RETRIES_MAX {
            let at = self.now + RETRY;
            self.app_at(at, node, again);
        } else {
            self.disturb(serial);
            self.end_early(node, serial, Early::Cancel);
        }
    }

    fn restart_offer(&mut self, node: NodeIndex, serial: Serial, handle: HandleId) -> Option<kvxfer_core::Result<()>> {
        let outcome = self.with_machine(node, |machine, now| machine.restart(now, handle));
        if let Some(Ok(())) = &outcome
            && let What::Offer(offer) = &mut self.ledger[serial as usize].what
        {
            offer.attempt += 1;
            self.coverage.reach(Point::Restarted);
            // The engine computes it all again; the blocks of the earlier attempt go to whoever is next.
            let gates = self
                .with_machine(node, |machine, _| machine.voided_gates(handle))
                .unwrap_or_default();
            let record = &mut self.ledger[serial as usize];
            record.shape = Shape::Selection(Selection::default());
            let blocks = std::mem::take(&mut record.blocks);
            self.take_back_behind(Retract {
                node,
                serial,
                gates,
                blocks: Some(blocks),
            });
        }
        outcome
    }

    /// Gives blocks back once no thread can read them any more: at once, if nobody is inside their gates.
    fn take_back_behind(&mut self, retract: Retract) {
        if !retract.gates.iter().all(|gate| gate.fenced()) {
            self.coverage.reach(Point::RetractWaited);
            self.workload.retracts.push(retract);
            return;
        }
        match retract.blocks {
            Some(blocks) => self.free_blocks(retract.serial, &blocks),
            None => self.release_blocks(retract.serial),
        }
    }

    fn open_claim(&mut self, node: NodeIndex, request: usize, set: usize, member: usize) {
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

    fn fill_claim(&mut self, node: NodeIndex, serial: Serial, tries: u32) {
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

    fn disturb(&mut self, serial: Serial) {
        let request = match &self.ledger[serial as usize].what {
            What::Offer(offer) => offer.request,
            What::Claim(claim) => claim.request,
            _ => return,
        };
        self.workload.requests[request].disturbed = true;
    }

    fn end_early(&mut self, node: NodeIndex, serial: Serial, how: Early) {
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
        let limit = self.now + self.profile.machine.fence_limit + Duration::from_millis(1);
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

    fn closed_or_fail(&mut self, call: &str, error: &kvxfer_core::Error) {
        if error.kind() != ErrorKind::Closed {
            self.fail("internal", format!("{call} is refused: {error}"));
        }
    }

    fn retract(&mut self, node: NodeIndex, serial: Serial, handle: HandleId, in_flight: bool) {
        let blocks: Vec<u32> = self.ledger[serial as usize].blocks.first().cloned().unwrap_or_default();
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

    /// A thread has left a gate as the last: a retract may have waited for it.
    pub(crate) fn gates_left(&mut self, node: NodeIndex) {
        let mut index = 0;
        while index < self.workload.retracts.len() {
            let retract = &self.workload.retracts[index];
            if retract.node == node && retract.gates.iter().all(|gate| gate.fenced()) {
                let retract = self.workload.retracts.swap_remove(index);
                self.take_back_behind(retract);
            } else {
                index += 1;
            }
        }
    }

    pub(crate) fn forget_retracts(&mut self, node: NodeIndex) {
        self.workload.retracts.retain(|retract| retract.node != node);
    }

    /// An engine that came back takes part in new requests, made with the addresses of now.
    pub(crate) fn resume_workload(&mut self, node: NodeIndex) {
        let all_up = (0..self.profile.sources).all(|source| self.nodes[source].body.is_some());
        for _ in 0..2 {
            let at = self.now + self.short_delay();
            if all_up {
                let addresses = (0..self.profile.sources)
                    .filter_map(|node| self.nodes[node].body.as_ref().map(|body| body.address.clone()))
                    .collect();
                let request = self.workload.requests.len();
                let made = self.make_request(request, addresses);
                self.workload.requests.push(made);
                self.schedule_request(request, at);
            }
            let raw = self.workload.raws.len();
            let own = self.rng.percent(50).then_some(node);
            let made = self.make_raw(own);
            let owner = made.owner;
            self.workload.raws.push(made);
            self.app_at(at, owner, AppEvent::OpenGrant { raw });
        }
    }

    pub(crate) fn noticed(&mut self, node: NodeIndex, handle: HandleId, notice: &Notice) {
        self.trace(|| format!("node {node} notice for {handle:?}: {notice:?}"));
    }

    /// A new record in the ledger.
    pub(crate) fn record(
        &mut self,
        node: NodeIndex,
        pool: usize,
        handle: HandleId,
        what: What,
        shape: Shape,
        limit: Duration,
    ) -> Serial {
        let serial = self.ledger.len() as Serial;
        let source = matches!(what, What::Offer(_) | What::Push { .. } | What::ReadGrant { .. });
        // A destination's owner decides alone; a source asks, and waits for an answer or for the peer's death.
        let asking = if source {
            self.profile.machine.liveness + Duration::from_millis(1_100)
        } else {
            Duration::ZERO
        };
        let must_end = self.now + limit + self.profile.machine.fence_limit + asking + Duration::from_millis(20);
        self.ledger.push(Record {
            node,
            life: self.nodes[node].life,
            pool,
            handle,
            what,
            shape,
            blocks: Vec::new(),
            opened: self.now,
            must_end,
            ended: None,
            arrived: None,
            released: false,
            died: None,
            ending: false,
            quarantined: false,
            came_from: BTreeSet::new(),
        });
        if handle != HandleId(u64::MAX) {
            self.name_record(serial, handle);
        }
        self.queue
            .push(must_end, Event::Check(super::world::Check::MustHaveEnded { serial }));
        serial
    }

    /// The handle of a record became known.
    pub(crate) fn name_record(&mut self, serial: Serial, handle: HandleId) {
        let node = self.ledger[serial as usize].node;
        self.ledger[serial as usize].handle = handle;
        let early = match self.nodes[node].body.as_mut() {
            Some(body) => {
                body.handles.insert(handle, serial);
                body.early_completions.remove(&handle)
            }
            None => None,
        };
        // It ended within the call that opened it.
        if let Some(result) = early {
            self.completed(node, handle, result);
        }
    }

    pub(crate) fn pool_id(&self, node: NodeIndex, pool: usize) -> Option<PoolId> {
        Some(self.nodes[node].body.as_ref()?.pools.get(pool)?.id)
    }

    /// The application has used what arrived, and gives the blocks back.
    fn release_after_use(&mut self, serial: Serial) {
        let record = &self.ledger[serial as usize];
        if !record.released && record.died.is_none() && !record.is_source() {
            // Still what it was at the arrival.
            self.verify_destination(serial);
        }
        self.release_blocks(serial);
    }
}

//! The applications of the simulated endpoints: prefill and decode engines that hand requests over, change their
//! minds, and give freed blocks to the next request at once.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::flow::Gate;
use kvxfer_core::machine::{HandleId, Notice};
use kvxfer_core::wire::{EndpointAddress, Grant};
use kvxfer_core::{PoolId, Time};

use super::coverage::Point;
use super::ledger::{Record, Serial, Shape, What};
use super::world::{Event, NodeIndex, World};

/// How often something that found no room is tried again, and for how long.
pub(crate) const RETRY: Duration = Duration::from_millis(7);
pub(crate) const RETRIES_MAX: u32 = 60;

/// What an application does at a time.
#[derive(Debug)]
pub(crate) enum AppEvent {
    OpenOffer {
        request: usize,
        source: usize,
        tries: u32,
    },
    OfferStep {
        serial: Serial,
        step: usize,
        tries: u32,
    },
    OpenClaim {
        request: usize,
        set: usize,
        member: usize,
    },
    FillClaim {
        serial: Serial,
        tries: u32,
    },
    EndEarly {
        serial: Serial,
        how: Early,
    },
    Release {
        serial: Serial,
    },
    OpenGrant {
        raw: usize,
    },
    UseGrant {
        raw: usize,
        grant: Box<Grant>,
        tries: u32,
    },
    /// Something that releases and pushes waited for has happened, or failed.
    EventHappens {
        event: u32,
        fails: bool,
    },
    AddPool,
    RemovePool {
        tries: u32,
    },
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
    pub(crate) scripts: Vec<Vec<Step>>,
    pub(crate) script_of: BTreeMap<Serial, usize>,
    /// Source blocks whose owner wants them back, and that wait for gates to be fenced.
    pub(crate) retracts: Vec<Retract>,
    pub(crate) events: super::events::Events,
}

/// Blocks taken back from a source that may still be read.
pub(crate) struct Retract {
    pub(crate) node: NodeIndex,
    pub(crate) serial: Serial,
    pub(crate) gates: Vec<Arc<Gate>>,
    /// These, or all that the handle has.
    pub(crate) blocks: Option<Vec<Vec<u32>>>,
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
    pub(crate) id: u128,
    pub(crate) nodes: Vec<NodeIndex>,
    pub(crate) held: u32,
}

impl Request {
    /// Tokens that this reader had already.
    pub(crate) fn held_of(&self, set: u128) -> u32 {
        self.sets.iter().find(|own| own.id == set).map_or(0, |own| own.held)
    }
}

/// What an offer's application does, in order.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Append(Range<u32>),
    Ready {
        tokens: Range<u32>,
        layers: Range<u16>,
        gated: bool,
    },
    Restart,
    Finish {
        tokens: u32,
        gated: bool,
    },
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
            AppEvent::EventHappens { event, fails } => self.event_happens(node, event, fails),
            AppEvent::AddPool => self.add_pool(node),
            AppEvent::RemovePool { tries } => self.remove_pool(node, tries),
            AppEvent::Drain => self.drain(node),
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
        let must_end = self.now + limit + self.profile.fence_limit() + asking + Duration::from_millis(20);
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

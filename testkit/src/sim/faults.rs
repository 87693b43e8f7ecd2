//! What happens to whole endpoints: stalls, crashes, restarts, shutdowns, partitions; and the checks at the end.

use std::time::Duration;

use kvxfer_core::Time;
use kvxfer_core::flow::SlotTable;
use kvxfer_core::machine::{Machine, MachineConfig, MachineSetup, PoolSetup, TransportOffer};
use kvxfer_core::wire::{EndpointAddress, RankCoordinates};
use kvxfer_core::{Incarnation, PoolId, Result};

use super::coverage::Point;
use super::direct::{DIRECT, DeviceEvent, keys_of};
use super::memory::SimPool;
use super::world::{Body, Check, Event, Fault, NodeIndex, World};
use std::sync::Arc;

/// How long after the quiet check everything must be closed.
const CLOSE_WITHIN: Duration = Duration::from_secs(4);

impl World {
    /// Starts a process on a node: a new incarnation under the node's name and address.
    pub(crate) fn start_process(&mut self, node: NodeIndex) -> Result<()> {
        let incarnation = Incarnation::from_bits(self.rng.next_u128());
        let rank = self.profile.rank_of(node);
        let address = EndpointAddress {
            sockets: vec![self.nodes[node].socket],
            incarnation: Some(incarnation),
            rank: RankCoordinates {
                tensor: rank,
                pipeline: (0, 1),
            },
        };
        let slots = SlotTable::new(self.profile.slots_max);
        let mut machine = Machine::new(MachineSetup {
            config: MachineConfig {
                name: self.nodes[node].name.clone(),
                ..self.profile.machine.clone()
            },
            incarnation,
            address: address.clone(),
            transports: self.transports(),
            slots: Arc::clone(&slots),
            seed: self.rng.next_u128(),
        });
        let model = self.profile.model.clone();
        let pool = SimPool::new(PoolId(0), model.layout(&mut self.rng, rank)?)?;
        machine.add_pool(
            self.now,
            pool.id,
            PoolSetup {
                layout: Arc::clone(&pool.layout),
                regions: Arc::clone(&pool.regions),
                serves: true,
                receives: true,
                keys: self.keys(node, pool.id),
            },
        )?;
        self.incarnations.insert((node, self.nodes[node].life), incarnation);
        self.nodes[node].body = Some(Body::new(machine, slots, incarnation, address, vec![pool]));
        self.trace(|| format!("node {node} starts as {incarnation:?}"));
        self.drain_actions(node);
        Ok(())
    }

    fn transports(&self) -> Vec<TransportOffer> {
        let offer = |name: &str, one_sided| TransportOffer {
            name: name.into(),
            advert: vec![1, 2, 3],
            one_sided,
        };
        let direct = self.profile.one_sided.then(|| offer(DIRECT, true));
        direct.into_iter().chain([offer("sim", false)]).collect()
    }

    /// What a process's device says of a pool.
    pub(crate) fn keys(&self, node: NodeIndex, pool: PoolId) -> Vec<(String, Vec<u8>)> {
        let keys = keys_of(node, self.nodes[node].life, pool);
        self.profile
            .one_sided
            .then(|| (DIRECT.to_string(), keys))
            .into_iter()
            .collect()
    }

    pub(crate) fn plan_faults(&mut self) {
        let nodes = self.nodes.len() as u64;
        for _ in 0..self.profile.device_failures {
            let node = self.rng.below(nodes) as usize;
            let at = self.now + self.within_span();
            self.queue
                .push(at, Event::Device(Box::new(DeviceEvent::DeviceFails { node })));
        }
        for _ in 0..self.profile.stalls {
            let node = self.rng.below(nodes) as usize;
            let at = self.now + self.within_span();
            let long = self.rng.percent(35);
            let millis = if long {
                self.rng.within(2_600..4_500)
            } else {
                self.rng.within(1..2_000)
            };
            let duration = Duration::from_millis(millis);
            self.queue.push(at, Event::Fault(Fault::Stall { node, duration }));
        }
        for _ in 0..self.profile.crashes {
            let node = self.rng.below(nodes) as usize;
            let at = self.now + self.within_span();
            let told = self.rng.percent(60);
            self.queue.push(at, Event::Fault(Fault::Crash { node, told }));
            if self.rng.percent(75) {
                let down = Duration::from_millis(self.rng.within(1..3_500));
                self.queue.push(at + down, Event::Fault(Fault::Restart { node }));
            }
        }
        for _ in 0..self.profile.shutdowns {
            let node = self.rng.below(nodes) as usize;
            let at = self.now + self.within_span();
            self.queue.push(at, Event::Fault(Fault::Shutdown { node }));
        }
        for _ in 0..self.profile.partitions {
            let a = self.rng.below(nodes) as usize;
            let b = (a + 1 + self.rng.below(nodes - 1) as usize) % nodes as usize;
            let at = self.now + self.within_span();
            let duration = Duration::from_millis(self.rng.within(50..3_500));
            self.queue.push(at, Event::Fault(Fault::Partition { a, b, duration }));
        }
        self.queue
            .push(self.now + self.profile.horizon, Event::Check(Check::Quiet));
    }

    pub(crate) fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Stall { node, duration } => self.stall(node, duration),
            Fault::Continue { node } => self.wake(node),
            Fault::Crash { node, told } => self.crash(node, told),
            Fault::Restart { node } => self.restart_process(node),
            Fault::Shutdown { node } => self.shutdown(node),
            Fault::Partition { a, b, duration } => {
                self.trace(|| format!("nodes {a} and {b} cannot talk for {duration:?}"));
                self.partitions.insert((a.min(b), a.max(b)), self.now + duration);
            }
        }
    }

    fn stall(&mut self, node: NodeIndex, duration: Duration) {
        if self.nodes[node].stalled || self.nodes[node].body.is_none() {
            return;
        }
        self.trace(|| format!("node {node} stops for {duration:?}"));
        self.nodes[node].stalled = true;
        self.coverage.reach(if duration > self.profile.machine.liveness {
            Point::StalledLong
        } else {
            Point::Stalled
        });
        if duration > Duration::from_millis(3_100)
            && let Some(incarnation) = self.nodes[node].body.as_ref().map(|body| body.incarnation)
        {
            self.expect_death_reports(node, incarnation);
        }
        self.queue
            .push(self.now + duration, Event::Fault(Fault::Continue { node }));
    }

    fn wake(&mut self, node: NodeIndex) {
        if !self.nodes[node].stalled {
            return;
        }
        self.trace(|| format!("node {node} continues"));
        self.nodes[node].stalled = false;
        self.nodes[node].last_stall_end = self.now;
        self.unpark(node);
    }

    fn crash(&mut self, node: NodeIndex, told: bool) {
        let Some(incarnation) = self.nodes[node].body.as_ref().map(|body| body.incarnation) else {
            return;
        };
        self.trace(|| format!("node {node} dies (told: {told})"));
        self.coverage.reach(Point::Crashed);
        self.kill_connections(node, told);
        self.kill_lanes(node, told);
        self.kill_devices(node);
        self.expect_death_reports(node, incarnation);
        self.end_process(node);
    }

    /// The process is gone, with everything it knew.
    fn end_process(&mut self, node: NodeIndex) {
        let (now, life) = (self.now, self.nodes[node].life);
        for record in &mut self.ledger {
            if record.node == node && record.life == life && record.died.is_none() {
                record.died = Some(now);
                record.released = true;
            }
        }
        let place = &mut self.nodes[node];
        place.body = None;
        place.stalled = false;
        place.life += 1;
        self.forget_parked(node);
        self.forget_retracts(node);
    }

    fn restart_process(&mut self, node: NodeIndex) {
        if self.nodes[node].body.is_some() {
            return;
        }
        self.coverage.reach(Point::RestartedEndpoint);
        if let Err(error) = self.start_process(node) {
            self.fail("internal", format!("node {node} cannot start: {error}"));
            return;
        }
        self.resume_workload(node);
    }

    pub(crate) fn shutdown(&mut self, node: NodeIndex) {
        let stalled = self.nodes[node].stalled;
        let Some(body) = self.nodes[node].body.as_mut().filter(|body| !body.closing && !stalled) else {
            return;
        };
        body.closing = true;
        self.coverage.reach(Point::Shutdown);
        self.trace(|| format!("node {node} shuts down"));
        self.with_machine(node, |machine, now| machine.shutdown(now));
        // Everything it has open ends within the fence limit.
        let limit = self.now + self.profile.fence_limit() + Duration::from_millis(200);
        for serial in 1..self.ledger.len() {
            let life = self.nodes[node].life;
            let record = &mut self.ledger[serial];
            if record.node == node && record.life == life && record.is_open() {
                record.must_end = record.must_end.min(limit);
                self.queue
                    .push(limit, Event::Check(Check::MustHaveEnded { serial: serial as u32 }));
            }
        }
    }

    /// At the horizon nothing is open, nothing is retained, and every block but the quarantined is free.
    pub(crate) fn must_be_quiet(&mut self) {
        for node in 0..self.nodes.len() {
            if self.nodes[node].stalled {
                self.wake(node);
            }
        }
        for serial in 1..self.ledger.len() {
            if self.ledger[serial].is_open() {
                let words = format!("{} is open at the end", self.describe(serial as u32));
                self.fail("8 alive", words);
                return;
            }
        }
        self.verdicts_agree();
        for node in 0..self.nodes.len() {
            self.node_must_be_quiet(node);
        }
        if self.failed() {
            return;
        }
        for node in 0..self.nodes.len() {
            self.shutdown(node);
        }
        self.queue.push(self.now + CLOSE_WITHIN, Event::Check(Check::Closed));
    }

    fn node_must_be_quiet(&mut self, node: NodeIndex) {
        let life = self.nodes[node].life;
        let quarantined = self
            .ledger
            .iter()
            .filter(|record| record.node == node && record.life == life && record.quarantined)
            .count();
        let Some(body) = self.nodes[node].body.as_ref() else {
            return;
        };
        let gauges = || format!("{:?}", body.machine.gauges());
        let slots = body.slots.in_use();
        let (owned, owner) = body
            .pools
            .iter()
            .map(SimPool::owned_bytes)
            .find(|(bytes, _)| *bytes > 0)
            .unwrap_or((0, 0));
        let strays = body.early_completions.len();
        let words = if !body.machine.is_quiet() {
            format!("node {node} is not quiet at the end: {}", gauges())
        } else if quarantined == 0 && slots > 0 {
            format!("node {node} leaks {slots} slots: {}", gauges())
        } else if quarantined == 0 && owned > 0 {
            format!(
                "node {node} has {owned} bytes that are not free: they belong to {}",
                self.describe(owner)
            )
        } else if strays > 0 {
            format!("node {node} reported the end of {strays} handles that nobody opened")
        } else {
            return;
        };
        self.fail("8 alive", words);
    }

    /// After a shutdown no connection and no link is open.
    pub(crate) fn must_be_closed(&mut self) {
        for node in 0..self.nodes.len() {
            let Some(body) = self.nodes[node].body.as_ref() else {
                continue;
            };
            if !body.connections.is_empty() || !body.links.is_empty() {
                let words = format!(
                    "node {node} has {} connections and {} links after its shutdown",
                    body.connections.len(),
                    body.links.len()
                );
                self.fail("8 alive", words);
                return;
            }
        }
        self.done = true;
    }

    pub(crate) fn begin(&mut self) {
        for node in 0..self.nodes.len() {
            if let Err(error) = self.start_process(node) {
                self.fail("internal", format!("node {node} cannot start: {error}"));
                return;
            }
        }
        self.now = Time::from_nanos(1_000_000);
        self.plan_workload();
        self.plan_faults();
    }
}

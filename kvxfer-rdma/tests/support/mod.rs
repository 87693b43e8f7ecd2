//! Two endpoints without a control plane: transports, slot tables, and a relay that carries what the links say to each
//! other, in order, as a session would.
// Each test binary uses a part of it.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, missing_docs)]

pub mod streams;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvxfer_core::flow::{
    ByteStream, Direction, Gate, LaneName, PartExtent, Remote, SendEvent, SendPart, SendSpec, SlotTable, SlotWatcher,
    TransferId,
};
use kvxfer_core::memory::Region;
use kvxfer_core::transport::{Link, LinkEvent, LinkPeer, LinkWatcher, RegionAccess, Registered, Transport};
use kvxfer_core::{Error, Generation, Incarnation, PoolId, SlotId};
use kvxfer_fake_verbs::FakeFabric;
use kvxfer_rdma::{RdmaConfig, RdmaTransport};
use parking_lot::{Condvar, Mutex};

pub use streams::*;

/// How long anything may take before a test gives up.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// What a slot's watcher saw.
#[derive(Default)]
pub struct Arrival {
    state: Mutex<Option<Option<Arc<[u8]>>>>,
    changed: Condvar,
    pub times: AtomicU64,
}

impl Arrival {
    pub fn wait(&self, patience: Duration) -> Option<Option<Arc<[u8]>>> {
        let mut state = self.state.lock();
        if state.is_none() {
            self.changed.wait_for(&mut state, patience);
        }
        state.clone()
    }
}

impl SlotWatcher for Arrival {
    fn arrived(&self, message: Option<Arc<[u8]>>) {
        self.times.fetch_add(1, Ordering::SeqCst);
        *self.state.lock() = Some(message);
        self.changed.notify_all();
    }
}

/// Everything a link has reported, in order; and the way to the other end.
#[derive(Default)]
pub struct Log {
    pub events: Mutex<Vec<LinkEvent>>,
    changed: Condvar,
    relay: Mutex<Option<mpsc::Sender<LinkEvent>>>,
    /// While set, what the link says stays here: a session whose connection is broken, or a peer that does not read.
    pub held: AtomicBool,
    kept: Mutex<Vec<LinkEvent>>,
}

impl LinkWatcher for Log {
    fn link_event(&self, _peer: Incarnation, event: LinkEvent) {
        if matches!(
            event,
            LinkEvent::LaneLost { .. } | LinkEvent::LaneFenced { .. } | LinkEvent::Message(_)
        ) {
            let mut kept = self.kept.lock();
            if self.held.load(Ordering::SeqCst) {
                kept.push(event.clone());
            } else if let Some(relay) = &*self.relay.lock() {
                let _ = relay.send(event.clone());
            }
        }
        self.events.lock().push(event);
        self.changed.notify_all();
    }
}

impl Log {
    /// Lets what was held go, in order.
    pub fn release(&self) {
        let mut kept = self.kept.lock();
        self.held.store(false, Ordering::SeqCst);
        if let Some(relay) = &*self.relay.lock() {
            for event in kept.drain(..) {
                let _ = relay.send(event);
            }
        }
    }

    /// Waits for an event that fits.
    pub fn wait<T>(&self, what: &str, mut fits: impl FnMut(&LinkEvent) -> Option<T>) -> T {
        self.wait_for(PATIENCE, &mut fits)
            .unwrap_or_else(|| panic!("no {what} within {PATIENCE:?}: {:?}", self.tail()))
    }

    pub fn wait_for<T>(&self, patience: Duration, mut fits: impl FnMut(&LinkEvent) -> Option<T>) -> Option<T> {
        let end = Instant::now() + patience;
        let mut events = self.events.lock();
        loop {
            if let Some(found) = events.iter().find_map(&mut fits) {
                return Some(found);
            }
            if self.changed.wait_until(&mut events, end).timed_out() {
                return events.iter().find_map(&mut fits);
            }
        }
    }

    pub fn arrived(&self, id: TransferId) {
        self.wait("arrival", |event| {
            matches!(event, LinkEvent::Send(SendEvent::Arrived(arrived)) if *arrived == id).then_some(())
        });
    }

    pub fn refused(&self, id: TransferId) {
        self.wait("refusal", |event| {
            matches!(event, LinkEvent::Send(SendEvent::Refused(refused)) if *refused == id).then_some(())
        });
    }

    pub fn quiet(&self, id: TransferId) {
        self.wait("quiet", |event| {
            matches!(event, LinkEvent::Send(SendEvent::Quiet(quiet)) if *quiet == id).then_some(())
        });
    }

    pub fn closed(&self) {
        self.wait("end of the link", |event| {
            matches!(event, LinkEvent::Closed).then_some(())
        });
    }

    pub fn lost(&self) -> Vec<(LaneName, usize, Error)> {
        let events = self.events.lock();
        events
            .iter()
            .filter_map(|event| match event {
                LinkEvent::LaneLost { lane, chunks, error } => Some((*lane, chunks.len(), error.clone())),
                _ => None,
            })
            .collect()
    }

    pub fn count(&self, fits: impl Fn(&LinkEvent) -> bool) -> usize {
        self.events.lock().iter().filter(|event| fits(event)).count()
    }

    fn tail(&self) -> Vec<String> {
        let events = self.events.lock();
        let seen = events.iter().filter(|event| !matches!(event, LinkEvent::Message(_)));
        let all: Vec<_> = seen.map(|event| format!("{event:?}")).collect();
        all[all.len().saturating_sub(12)..].to_vec()
    }
}

/// One endpoint: a transport and its slots.
pub struct Node {
    pub incarnation: Incarnation,
    pub slots: Arc<SlotTable>,
    pub transport: Arc<RdmaTransport>,
}

/// Memory that a node has registered.
pub struct Memory {
    pub regions: Arc<[Arc<Region>]>,
    pub registered: Registered,
}

impl Memory {
    pub fn keys(&self) -> Arc<[u8]> {
        self.registered.keys.clone().into()
    }

    pub fn fill(&self, region: usize, seed: u64) {
        let bytes = bytes_of(seed, self.regions[region].length() as usize);
        self.regions[region].copy_in(0, &bytes).unwrap();
    }

    pub fn read(&self, region: usize, offset: u64, length: usize) -> Vec<u8> {
        let mut out = vec![0; length];
        self.regions[region].copy_out(offset, &mut out).unwrap();
        out
    }
}

/// Bytes that depend on a seed and their place.
pub fn bytes_of(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// Logs to the test's output as `RUST_LOG` says.
pub fn logs() {
    let filter = tracing_subscriber::EnvFilter::from_default_env();
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_test_writer()
        .try_init();
}

impl Node {
    pub fn new(bits: u128, config: RdmaConfig) -> Node {
        logs();
        let slots = SlotTable::new(1 << 17);
        let transport = Arc::new(RdmaTransport::new(config, slots.clone()).unwrap());
        Node {
            incarnation: Incarnation::from_bits(bits),
            slots,
            transport,
        }
    }

    pub fn memory(&self, lengths: &[u64]) -> Memory {
        let regions: Arc<[Arc<Region>]> = lengths
            .iter()
            .map(|length| Region::allocate(*length).unwrap())
            .collect();
        let access = RegionAccess {
            serves: true,
            receives: true,
        };
        let registered = self.transport.register(&regions, access).unwrap();
        Memory { regions, registered }
    }

    /// The other side's view of this node.
    pub fn peer(&self, local: &Node, token: u128, dials: bool) -> LinkPeer {
        LinkPeer {
            incarnation: self.incarnation,
            local: local.incarnation,
            addresses: Vec::new(),
            advert: self.transport.advertise(),
            token,
            dials,
        }
    }

    /// Opens a slot for a stream.
    pub fn grant(
        &self,
        stream: Arc<dyn ByteStream>,
        memory: &Memory,
        watcher: Option<Arc<Arrival>>,
    ) -> (SlotId, Generation) {
        let watcher = watcher.map(|watcher| watcher as Arc<dyn SlotWatcher>);
        self.slots
            .open_target(
                Box::new(StreamTarget { stream }),
                memory.regions.clone(),
                None,
                PoolId(0),
                watcher,
            )
            .unwrap()
    }
}

/// Two nodes and the link between them, each end with its log.
pub struct Pair {
    pub left: Node,
    pub right: Node,
    pub left_link: Arc<dyn Link>,
    pub right_link: Arc<dyn Link>,
    pub left_log: Arc<Log>,
    pub right_log: Arc<Log>,
    next: AtomicU64,
}

impl Pair {
    /// Joins them; the left one dials.
    pub fn new(left: Node, right: Node) -> Pair {
        let (left_log, right_log) = (Arc::new(Log::default()), Arc::new(Log::default()));
        let (to_right, from_left) = mpsc::channel();
        let (to_left, from_right) = mpsc::channel();
        *left_log.relay.lock() = Some(to_right);
        *right_log.relay.lock() = Some(to_left);
        let right_link = right
            .transport
            .connect(left.peer(&right, 7, false), right_log.clone())
            .unwrap();
        let left_link = left
            .transport
            .connect(right.peer(&left, 7, true), left_log.clone())
            .unwrap();
        relay(from_left, right_link.clone());
        relay(from_right, left_link.clone());
        Pair {
            left,
            right,
            left_link,
            right_link,
            left_log,
            right_log,
            next: AtomicU64::new(1),
        }
    }

    pub fn up(self) -> Pair {
        for log in [&self.left_log, &self.right_log] {
            log.wait("link", |event| matches!(event, LinkEvent::Up).then_some(()));
        }
        self
    }

    /// Starts to write `source` of the left side into a slot of the right side.
    pub fn push(
        &self,
        memory: &Memory,
        source: Arc<dyn ByteStream>,
        slot: (SlotId, Generation),
        target: &Memory,
        destination: Arc<dyn ByteStream>,
    ) -> Sent {
        self.push_with(memory, source, slot, target, destination, |_| {})
    }

    pub fn push_with(
        &self,
        memory: &Memory,
        source: Arc<dyn ByteStream>,
        slot: (SlotId, Generation),
        target: &Memory,
        destination: Arc<dyn ByteStream>,
        change: impl FnOnce(&mut SendSpec),
    ) -> Sent {
        let id = TransferId(self.next.fetch_add(1, Ordering::SeqCst));
        let gate = Gate::new();
        let mut spec = SendSpec {
            id,
            slot: slot.0,
            generation: slot.1,
            gate: gate.clone(),
            regions: memory.regions.clone(),
            message: None,
            priority: 0,
            deadline: None,
            checksum: false,
            remote: Some(Remote {
                direction: Direction::Write,
                pool: PoolId(0),
                keys: target.keys(),
            }),
        };
        change(&mut spec);
        self.left_link.submit(spec).unwrap();
        self.left_link.add_part(
            id,
            SendPart {
                part: 0,
                extent: PartExtent::WHOLE,
                stream: source,
                remote: Some(destination),
            },
        );
        Sent { id, gate }
    }

    /// Starts to read the right side's `source` into a slot of the left side.
    pub fn pull(
        &self,
        memory: &Memory,
        slot: (SlotId, Generation),
        destination: Arc<dyn ByteStream>,
        target: &Memory,
        source: Arc<dyn ByteStream>,
    ) -> Sent {
        let id = TransferId(self.next.fetch_add(1, Ordering::SeqCst));
        let gate = Gate::new();
        let spec = SendSpec {
            id,
            slot: slot.0,
            generation: slot.1,
            gate: gate.clone(),
            regions: memory.regions.clone(),
            message: None,
            priority: 0,
            deadline: None,
            checksum: false,
            remote: Some(Remote {
                direction: Direction::Read,
                pool: PoolId(0),
                keys: target.keys(),
            }),
        };
        self.left_link.submit(spec).unwrap();
        self.left_link.add_part(
            id,
            SendPart {
                part: 0,
                extent: PartExtent::WHOLE,
                stream: destination,
                remote: Some(source),
            },
        );
        Sent { id, gate }
    }
}

/// A transfer that was begun.
pub struct Sent {
    pub id: TransferId,
    pub gate: Arc<Gate>,
}

/// Carries what one end says to the other, as the control planes and their session do.
fn relay(from: mpsc::Receiver<LinkEvent>, to: Arc<dyn Link>) {
    std::thread::spawn(move || {
        while let Ok(event) = from.recv() {
            match event {
                LinkEvent::Message(body) => to.message(body),
                LinkEvent::LaneLost { lane, chunks, .. } => to.fence_lane(lane, chunks),
                LinkEvent::LaneFenced { lane, chunks } => to.lane_fenced(lane, chunks),
                _ => {}
            }
        }
    });
}

/// Where a test runs: on the devices that `KVXFER_TEST_DEVICES` names (`rxe0,rxe1`), else on a fabric of fakes.
pub struct Site {
    pub fabric: Option<FakeFabric>,
    devices: Vec<String>,
}

impl Site {
    pub fn open() -> Site {
        Site::with(&[])
    }

    /// With these settings of the fakes.
    pub fn with(settings: &[(&str, &str, &str)]) -> Site {
        match std::env::var("KVXFER_TEST_DEVICES") {
            Ok(devices) => Site {
                fabric: None,
                devices: devices.split(',').map(str::to_owned).collect(),
            },
            Err(_) => Site {
                fabric: Some(FakeFabric::with(settings).unwrap()),
                devices: vec!["fake0".into(), "fake1".into()],
            },
        }
    }

    /// Whether the devices are real.
    pub fn is_real(&self) -> bool {
        self.fabric.is_none()
    }

    /// Settings for one device of the site.
    pub fn config(&self, device: usize) -> RdmaConfig {
        RdmaConfig {
            library: self.fabric.as_ref().map(FakeFabric::library_path),
            devices: vec![self.devices[device].clone()],
            ..RdmaConfig::default()
        }
    }

    /// Two nodes, one on each device, and their link.
    pub fn pair(&self) -> Pair {
        self.pair_with(|_| {})
    }

    pub fn pair_with(&self, change: impl Fn(&mut RdmaConfig)) -> Pair {
        let node = |bits, device| {
            let mut config = self.config(device);
            change(&mut config);
            Node::new(bits, config)
        };
        Pair::new(node(1, 0), node(2, 1)).up()
    }
}

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
    ByteStream, Close, Direction, Gate, LaneName, PartExtent, Remote, SendEvent, SendPart, SendSpec, SlotTable,
    SlotWatcher, TransferId,
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

    /// Lets the first `count` bodies that were held go; the rest stays.
    pub fn release_some(&self, count: usize) {
        let mut kept = self.kept.lock();
        let count = count.min(kept.len());
        if let Some(relay) = &*self.relay.lock() {
            for event in kept.drain(..count) {
                let _ = relay.send(event);
            }
        }
    }

    /// From now on nothing of what the link says comes through.
    pub fn hold(&self) {
        self.held.store(true, Ordering::SeqCst);
    }

    /// How much is held.
    pub fn kept(&self) -> usize {
        self.kept.lock().len()
    }

    /// Forgets what was reported.
    pub fn clear(&self) {
        self.events.lock().clear();
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

    /// The last of what was reported.
    pub fn tail(&self) -> Vec<String> {
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

    /// The bytes of a stream.
    pub fn bytes(&self, stream: &Stream) -> Vec<u8> {
        let mut segments = Vec::new();
        let length = stream.length();
        assert_eq!(stream.segments(0, length, usize::MAX, &mut segments), length);
        segments
            .iter()
            .flat_map(|segment| self.read(segment.region as usize, segment.offset, segment.length as usize))
            .collect()
    }

    /// Puts the same byte everywhere in a stream.
    pub fn paint(&self, stream: &Stream, byte: u8) {
        let mut segments = Vec::new();
        stream.segments(0, stream.length(), usize::MAX, &mut segments);
        for segment in segments {
            let bytes = vec![byte; segment.length as usize];
            self.regions[segment.region as usize]
                .copy_in(segment.offset, &bytes)
                .unwrap();
        }
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

impl Node {
    /// A counter of the transport, over all links and rails.
    pub fn counter(&self, name: &str) -> u64 {
        self.counter_where(name, |_| true)
    }

    /// The same, over those whose labels fit.
    pub fn counter_where(&self, name: &str, fits: impl Fn(&[(&'static str, String)]) -> bool) -> u64 {
        let counters = self.transport.counters();
        let named = counters
            .iter()
            .filter(|counter| counter.name == name && fits(&counter.labels));
        named.map(|counter| counter.value as u64).sum()
    }

    /// Bytes that this side's device has written and that are acknowledged.
    pub fn written(&self) -> u64 {
        self.counter_where("rail_bytes_total", |labels| {
            labels.contains(&("direction", "sent".into()))
        })
    }

    /// Closes a slot and waits until nothing can land in it any more, as the control plane does. How it was closed.
    pub fn take_back(&self, link: &Arc<dyn Link>, slot: (SlotId, Generation)) -> Close {
        let close = self.slots.close(slot.0, slot.1);
        if close == Close::Waiting {
            link.revoke(slot.0, slot.1);
            until("the fence of a slot", || self.slots.fenced(slot.0, slot.1));
        }
        close
    }
}

/// Waits until something is so.
pub fn until(what: &str, so: impl FnMut() -> bool) {
    assert!(soon(PATIENCE, so), "{what}: not within {PATIENCE:?}");
}

/// Whether something becomes so in time.
pub fn soon(patience: Duration, mut so: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + patience;
    while !so() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    true
}

/// One end of a pair, to start transfers from.
#[derive(Clone, Copy)]
pub struct End<'a> {
    pub node: &'a Node,
    pub link: &'a Arc<dyn Link>,
    pub log: &'a Log,
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
        Pair::joined(left, right, true)
    }

    pub fn left(&self) -> End<'_> {
        End {
            node: &self.left,
            link: &self.left_link,
            log: &self.left_log,
        }
    }

    pub fn right(&self) -> End<'_> {
        End {
            node: &self.right,
            link: &self.right_link,
            log: &self.right_log,
        }
    }

    /// A transfer's number.
    pub fn next_id(&self) -> TransferId {
        TransferId(self.next.fetch_add(1, Ordering::SeqCst))
    }

    /// Writes `source` of the left side into blocks of the right side, waits until it has arrived, and compares.
    pub fn carry(&self, memory: &Memory, source: &Stream, target: &Memory, destination: &Stream) {
        self.carry_with(memory, source, target, destination, |_| {});
    }

    pub fn carry_with(
        &self,
        memory: &Memory,
        source: &Stream,
        target: &Memory,
        destination: &Stream,
        change: impl FnOnce(&mut SendSpec),
    ) {
        let arrival = Arc::new(Arrival::default());
        let slot = self.right.grant(destination.clone(), target, Some(arrival.clone()));
        let sent = self.push_with(memory, source.clone(), slot, target, destination.clone(), change);
        arrival
            .wait(PATIENCE)
            .unwrap_or_else(|| panic!("no arrival: {:?}", self.left_log.tail()));
        self.left_log.arrived(sent.id);
        assert!(memory.bytes(source) == target.bytes(destination), "other bytes arrived");
        assert_eq!(arrival.times.load(Ordering::SeqCst), 1);
        self.left_link.forget(sent.id);
        assert!(self.right.slots.fenced(slot.0, slot.1) && self.right.slots.release(slot.0, slot.1));
    }

    /// The same by reading: the left side's blocks get what is in the right side's.
    pub fn fetch(&self, memory: &Memory, destination: &Stream, target: &Memory, source: &Stream) {
        let arrival = Arc::new(Arrival::default());
        let slot = self.left.grant(destination.clone(), memory, Some(arrival.clone()));
        let sent = self.pull(memory, slot, destination.clone(), target, source.clone());
        arrival
            .wait(PATIENCE)
            .unwrap_or_else(|| panic!("no arrival: {:?}", self.left_log.tail()));
        self.left_log.arrived(sent.id);
        assert!(memory.bytes(destination) == target.bytes(source), "other bytes arrived");
        assert_eq!(arrival.times.load(Ordering::SeqCst), 1);
        self.left_link.forget(sent.id);
        assert!(self.left.slots.release(slot.0, slot.1));
    }

    /// What the left side is asked for to write into a slot of the right side.
    pub fn spec(&self, id: TransferId, memory: &Memory, slot: (SlotId, Generation), target: &Memory) -> SendSpec {
        SendSpec {
            id,
            slot: slot.0,
            generation: slot.1,
            gate: Gate::new(),
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
        }
    }

    /// Starts a transfer into a slot that the left side knows to be admitted, with all that the left side says from then
    /// on held.
    pub fn hold_after_admission(&self, slot: (SlotId, Generation), start: impl FnOnce() -> Sent) -> Sent {
        self.right_link.admit(slot.0, slot.1);
        // The relay is quick, but asynchronous.
        std::thread::sleep(Duration::from_millis(50));
        self.left_log.hold();
        start()
    }

    /// Joins them; the left one dials, or the right one.
    pub fn joined(left: Node, right: Node, left_dials: bool) -> Pair {
        let (left_log, right_log) = (Arc::new(Log::default()), Arc::new(Log::default()));
        let (to_right, from_left) = mpsc::channel();
        let (to_left, from_right) = mpsc::channel();
        *left_log.relay.lock() = Some(to_right);
        *right_log.relay.lock() = Some(to_left);
        let right_link = right
            .transport
            .connect(left.peer(&right, 7, !left_dials), right_log.clone())
            .unwrap();
        let left_link = left
            .transport
            .connect(right.peer(&left, 7, left_dials), left_log.clone())
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

impl End<'_> {
    /// Starts to write `source` into a slot of the other side.
    pub fn push(
        &self,
        id: TransferId,
        memory: &Memory,
        source: &Stream,
        slot: (SlotId, Generation),
        target: &Memory,
        destination: &Stream,
    ) -> Sent {
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
                direction: Direction::Write,
                pool: PoolId(0),
                keys: target.keys(),
            }),
        };
        self.link.submit(spec).unwrap();
        let part = SendPart {
            part: 0,
            extent: PartExtent::WHOLE,
            stream: source.clone(),
            remote: Some(destination.clone()),
        };
        self.link.add_part(id, part);
        Sent { id, gate }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // Else each relay keeps the other's link alive.
        *self.left_log.relay.lock() = None;
        *self.right_log.relay.lock() = None;
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

/// Where a test runs: on the devices that `KVXFER_TEST_DEVICES` names (`rxe0,rxe1`), on all of the place that
/// `testkit/soft-roce/run` made, or on a fabric of fakes. Devices 2n and 2n + 1 are joined.
pub struct Site {
    pub fabric: Option<FakeFabric>,
    devices: Vec<String>,
    // Whether the place is not as it was.
    changed: AtomicBool,
}

impl Site {
    pub fn open() -> Site {
        Site::with(&[])
    }

    /// With these settings of the fakes; four devices unless they say otherwise.
    pub fn with(settings: &[(&str, &str, &str)]) -> Site {
        let named = std::env::var("KVXFER_TEST_DEVICES").ok();
        let named = named.or_else(|| std::env::var("SOFT_ROCE").ok().map(|_| found().join(",")));
        match named {
            Some(devices) => Site {
                fabric: None,
                devices: devices.split(',').map(str::to_owned).collect(),
                changed: AtomicBool::new(false),
            },
            None => {
                let mut all = vec![("*", "devices", "4")];
                all.extend_from_slice(settings);
                Site {
                    fabric: Some(FakeFabric::with(&all).unwrap()),
                    devices: (0..4).map(|index| format!("fake{index}")).collect(),
                    changed: AtomicBool::new(false),
                }
            }
        }
    }

    /// Whether the devices are real.
    pub fn is_real(&self) -> bool {
        self.fabric.is_none()
    }

    /// The fakes, for tests that only they make possible. Says so where there are none.
    pub fn fakes(&self) -> Option<&FakeFabric> {
        if self.fabric.is_none() {
            println!("skipped: this needs what only fake devices do");
        }
        self.fabric.as_ref()
    }

    /// One number on the fakes, another on real devices, of which this machine has one processor.
    pub fn choose<T>(&self, fakes: T, real: T) -> T {
        if self.is_real() { real } else { fakes }
    }

    /// Pairs of devices that there are.
    pub fn rails(&self) -> usize {
        self.devices.len() / 2
    }

    /// Settings for one device of the site.
    pub fn config(&self, device: usize) -> RdmaConfig {
        self.config_of(&[device])
    }

    pub fn config_of(&self, devices: &[usize]) -> RdmaConfig {
        RdmaConfig {
            library: self.fabric.as_ref().map(FakeFabric::library_path),
            devices: devices.iter().map(|device| self.devices[*device].clone()).collect(),
            ..RdmaConfig::default()
        }
    }

    /// Two nodes, one on each device, and their link.
    pub fn pair(&self) -> Pair {
        self.pair_with(|_| {})
    }

    pub fn pair_with(&self, change: impl Fn(&mut RdmaConfig)) -> Pair {
        let (left, right) = self.nodes(1, change);
        Pair::new(left, right).up()
    }

    /// Two nodes that have so many devices each.
    pub fn nodes(&self, rails: usize, change: impl Fn(&mut RdmaConfig)) -> (Node, Node) {
        let node = |bits, first: usize| {
            let devices: Vec<usize> = (0..rails).map(|rail| 2 * rail + first).collect();
            let mut config = self.config_of(&devices);
            change(&mut config);
            Node::new(bits, config)
        };
        (node(1, 0), node(2, 1))
    }

    /// What leaves a device takes so long to reach the other: bytes are in flight.
    pub fn delay(&self, time: Duration) {
        let micros = time.as_micros();
        match &self.fabric {
            Some(fabric) => fabric.set_now("*", "latency_us", &micros.to_string()).unwrap(),
            None => self.netem(&["delay", &format!("{micros}us")]),
        }
    }

    /// Nothing reaches any device any more, silently.
    pub fn lose_everything(&self) {
        match &self.fabric {
            Some(fabric) => fabric.set_now("*", "drop_percent", "100").unwrap(),
            None => self.netem(&["loss", "100%"]),
        }
    }

    /// A device's link goes down.
    pub fn down(&self, device: usize) {
        match &self.fabric {
            Some(fabric) => fabric.set_now(&self.devices[device], "port_state", "down").unwrap(),
            None => {
                self.changed.store(true, Ordering::SeqCst);
                command("ip", &["link", "set", &self.interface(device), "down"]);
            }
        }
    }

    /// And comes back.
    pub fn up(&self, device: usize) {
        match &self.fabric {
            Some(fabric) => fabric.set_now(&self.devices[device], "port_state", "active").unwrap(),
            None => {
                // Both ends of the link lost what they knew of each other.
                let (first, second) = (device & !1, device | 1);
                self.soft_roce(&["up", &self.devices[first], &self.devices[second]]);
            }
        }
    }

    /// Undoes delays and losses.
    pub fn clear(&self) {
        match &self.fabric {
            Some(fabric) => {
                fabric.set_now("*", "latency_us", "0").unwrap();
                fabric.set_now("*", "drop_percent", "0").unwrap();
            }
            None => self.netem(&["delay", "0us"]),
        }
    }

    // `soft-roce netem`, `clear` and `down` do the same, but as scripts, which take a second there.
    fn netem(&self, how: &[&str]) {
        self.changed.store(true, Ordering::SeqCst);
        for device in 0..self.devices.len() {
            let mut arguments = vec!["qdisc", "replace", "dev"];
            let interface = self.interface(device);
            arguments.extend([interface.as_str(), "root", "netem"]);
            arguments.extend_from_slice(how);
            arguments.extend(["limit", "100000"]);
            command("tc", &arguments);
        }
    }

    fn interface(&self, device: usize) -> String {
        self.devices[device].replace("rxe", "veth")
    }

    /// Changes the place that `testkit/soft-roce/run` made.
    fn soft_roce(&self, arguments: &[&str]) {
        self.changed.store(true, Ordering::SeqCst);
        command("soft-roce", arguments);
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // The next test finds the place as this one did.
        if self.is_real() && self.changed.load(Ordering::SeqCst) {
            self.soft_roce(&["clear", "all"]);
            self.soft_roce(&["up", "all"]);
        }
    }
}

fn found() -> Vec<String> {
    let devices = std::fs::read_dir("/sys/class/infiniband").unwrap();
    let mut names: Vec<String> = devices
        .map(|device| device.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("rxe"))
        .collect();
    names.sort();
    names
}

fn command(name: &str, arguments: &[&str]) {
    let status = std::process::Command::new(name).args(arguments).status().unwrap();
    assert!(
        status.success() || std::thread::panicking(),
        "{name} {arguments:?}: {status}"
    );
}

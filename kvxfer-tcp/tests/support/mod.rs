//! Two endpoints without a control plane: transports, slot tables, listeners, and a relay that carries fences.
// Each test binary uses a part of it.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvxfer_core::flow::{
    ByteStream, Gate, LaneName, PartExtent, SendEvent, SendPart, SendSpec, SlotTable, SlotTarget, SlotWatcher,
    TransferId,
};
use kvxfer_core::memory::{Region, Segment};
use kvxfer_core::transport::{Link, LinkEvent, LinkPeer, LinkWatcher, Transport};
use kvxfer_core::wire::lane::{HELLO_BYTES, LaneHello};
use kvxfer_core::{Error, Generation, Incarnation, PoolId, Result, SlotId};
use kvxfer_tcp::{TcpConfig, TcpTransport};
use kvxfer_testkit::staged::StagedMemory;
use parking_lot::{Condvar, Mutex};

/// How long anything may take before a test gives up.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// Equal pieces at given places: what a block list comes to.
#[derive(Debug)]
pub struct Pieces {
    pub region: u32,
    pub offsets: Vec<u64>,
    pub length: u64,
}

impl Pieces {
    pub fn bytes(&self) -> u64 {
        self.offsets.len() as u64 * self.length
    }
}

impl ByteStream for Pieces {
    fn length(&self) -> u64 {
        self.bytes()
    }

    fn segments(&self, offset: u64, length: u64, segments_max: usize, out: &mut Vec<Segment>) -> u64 {
        let end = offset.saturating_add(length).min(self.bytes());
        let mut at = offset;
        while at < end {
            let (index, inside) = ((at / self.length) as usize, at % self.length);
            let step = (self.length - inside).min(end - at);
            let place = self.offsets[index] + inside;
            let full = out.len() == segments_max;
            match out.last_mut() {
                Some(last) if last.region == self.region && last.offset + last.length == place => last.length += step,
                _ if full => break,
                _ => out.push(Segment {
                    region: self.region,
                    offset: place,
                    length: step,
                }),
            }
            at += step;
        }
        at.min(end).saturating_sub(offset)
    }
}

/// Arbitrary segments, over several regions.
#[derive(Debug)]
pub struct Scattered(pub Vec<Segment>);

impl ByteStream for Scattered {
    fn length(&self) -> u64 {
        self.0.iter().map(|segment| segment.length).sum()
    }

    fn segments(&self, offset: u64, length: u64, segments_max: usize, out: &mut Vec<Segment>) -> u64 {
        let (mut skip, mut left) = (offset, length);
        for segment in &self.0 {
            if skip >= segment.length {
                skip -= segment.length;
                continue;
            }
            if left == 0 || out.len() == segments_max {
                break;
            }
            let step = (segment.length - skip).min(left);
            out.push(Segment {
                region: segment.region,
                offset: segment.offset + skip,
                length: step,
            });
            left -= step;
            skip = 0;
        }
        length - left
    }
}

/// A grant of one stream; its parts are token ranges, one token being `bytes_per_token` bytes.
pub struct StreamTarget {
    pub stream: Arc<dyn ByteStream>,
}

impl SlotTarget for StreamTarget {
    fn bytes(&self) -> Result<u64> {
        Ok(self.stream.length())
    }

    fn layers(&self) -> u16 {
        1
    }

    fn stream(&self, extent: PartExtent) -> Result<Arc<dyn ByteStream>> {
        let length = self.stream.length();
        let start = u64::from(extent.token_start).min(length);
        let end = u64::from(extent.token_end).min(length);
        if (start, end) == (0, length) {
            return Ok(self.stream.clone());
        }
        Ok(Arc::new(Window {
            stream: self.stream.clone(),
            start,
            length: end.saturating_sub(start),
        }))
    }
}

/// A part of a stream.
#[derive(Debug)]
pub struct Window {
    pub stream: Arc<dyn ByteStream>,
    pub start: u64,
    pub length: u64,
}

impl ByteStream for Window {
    fn length(&self) -> u64 {
        self.length
    }

    fn segments(&self, offset: u64, length: u64, segments_max: usize, out: &mut Vec<Segment>) -> u64 {
        let length = length.min(self.length.saturating_sub(offset));
        self.stream.segments(self.start + offset, length, segments_max, out)
    }
}

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

/// Everything a link has reported, in order.
#[derive(Default)]
pub struct Log {
    pub events: Mutex<Vec<LinkEvent>>,
    changed: Condvar,
    relay: Mutex<Option<mpsc::Sender<LinkEvent>>>,
}

impl LinkWatcher for Log {
    fn link_event(&self, _peer: Incarnation, event: LinkEvent) {
        if matches!(event, LinkEvent::LaneLost { .. } | LinkEvent::LaneFenced { .. })
            && let Some(relay) = &*self.relay.lock()
        {
            let _ = relay.send(event.clone());
        }
        self.events.lock().push(event);
        self.changed.notify_all();
    }
}

impl Log {
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

    pub fn quiet(&self, id: TransferId) {
        self.wait("quiet", |event| {
            matches!(event, LinkEvent::Send(SendEvent::Quiet(quiet)) if *quiet == id).then_some(())
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
        let skip = events.len().saturating_sub(12);
        events.iter().skip(skip).map(|event| format!("{event:?}")).collect()
    }
}

/// One endpoint: a transport, its slots and its listener.
pub struct Node {
    pub incarnation: Incarnation,
    pub slots: Arc<SlotTable>,
    pub transport: Arc<TcpTransport>,
    pub address: SocketAddr,
    stopping: Arc<AtomicBool>,
    listener: Option<JoinHandle<()>>,
    /// Results of adoptions that failed.
    pub refused: Arc<Mutex<Vec<Error>>>,
}

impl Node {
    pub fn new(bits: u128, config: TcpConfig, ip: IpAddr) -> Node {
        let slots = SlotTable::new(1 << 16);
        let transport = Arc::new(TcpTransport::new(config, slots.clone()).unwrap());
        let listener = TcpListener::bind((ip, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let stopping = Arc::new(AtomicBool::new(false));
        let refused = Arc::new(Mutex::new(Vec::new()));
        let thread = {
            let (transport, stopping, refused) = (transport.clone(), stopping.clone(), refused.clone());
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    if stopping.load(Ordering::SeqCst) {
                        return;
                    }
                    let Ok(mut stream) = stream else { continue };
                    let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
                    let mut bytes = [0; HELLO_BYTES];
                    if stream.read_exact(&mut bytes).is_err() {
                        continue;
                    }
                    let adopted = LaneHello::decode(&bytes).and_then(|hello| transport.adopt(stream, hello));
                    if let Err(error) = adopted {
                        refused.lock().push(error);
                    }
                }
            })
        };
        Node {
            incarnation: Incarnation::from_bits(bits),
            slots,
            transport,
            address,
            stopping,
            listener: Some(thread),
            refused,
        }
    }

    /// The other side's view of this node.
    pub fn peer(&self, local: &Node, token: u128, dials: bool) -> LinkPeer {
        LinkPeer {
            incarnation: self.incarnation,
            local: local.incarnation,
            addresses: vec![self.address],
            advert: self.transport.advertise(),
            token,
            dials,
        }
    }

    /// Opens a slot for a stream.
    pub fn grant(
        &self,
        stream: Arc<dyn ByteStream>,
        regions: &Arc<[Arc<Region>]>,
        watcher: Option<Arc<Arrival>>,
    ) -> (SlotId, Generation) {
        let watcher = watcher.map(|watcher| watcher as Arc<dyn SlotWatcher>);
        self.slots
            .open_target(
                Box::new(StreamTarget { stream }),
                regions.clone(),
                None,
                PoolId(0),
                watcher,
            )
            .unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::SeqCst);
        // Wakes the listener up.
        let _ = TcpStream::connect(self.address);
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
        self.transport.shutdown();
    }
}

/// A link's two ends, `a` dialing, with fences relayed between them.
pub struct Pair {
    pub a: Node,
    pub b: Node,
    pub link_a: Arc<dyn Link>,
    pub link_b: Arc<dyn Link>,
    pub log_a: Arc<Log>,
    pub log_b: Arc<Log>,
    relays: Vec<JoinHandle<()>>,
    /// Fences wait while this is set.
    pub hold_fences: Arc<AtomicBool>,
}

/// The session secret of all pairs.
pub const TOKEN: u128 = 0x5ec2e7;

pub fn v4() -> IpAddr {
    IpAddr::V4(Ipv4Addr::LOCALHOST)
}

pub fn v6() -> IpAddr {
    IpAddr::V6(Ipv6Addr::LOCALHOST)
}

impl Pair {
    pub fn new(config: TcpConfig) -> Pair {
        Pair::with(config.clone(), config, v4(), None)
    }

    /// `via` is where `a` dials instead of `b` itself.
    pub fn with(
        config_a: TcpConfig,
        config_b: TcpConfig,
        ip: IpAddr,
        via: Option<&dyn Fn(SocketAddr) -> SocketAddr>,
    ) -> Pair {
        let a = Node::new(0xa, config_a, ip);
        let b = Node::new(0xb, config_b, ip);
        Pair::between(a, b, via, TOKEN)
    }

    pub fn between(a: Node, b: Node, via: Option<&dyn Fn(SocketAddr) -> SocketAddr>, token: u128) -> Pair {
        let (log_a, log_b) = (Arc::new(Log::default()), Arc::new(Log::default()));
        let mut to_b = b.peer(&a, token, true);
        if let Some(via) = via {
            to_b.addresses = vec![via(b.address)];
        }
        let link_b = b.transport.connect(a.peer(&b, token, false), log_b.clone()).unwrap();
        let link_a = a.transport.connect(to_b, log_a.clone()).unwrap();
        let hold_fences = Arc::new(AtomicBool::new(false));
        let relays = vec![
            relay(&log_a, &link_b, &hold_fences),
            relay(&log_b, &link_a, &hold_fences),
        ];
        Pair {
            a,
            b,
            link_a,
            link_b,
            log_a,
            log_b,
            relays,
            hold_fences,
        }
    }

    pub fn up(self) -> Pair {
        self.log_a
            .wait("link", |event| matches!(event, LinkEvent::Up).then_some(()));
        self.log_b
            .wait("link", |event| matches!(event, LinkEvent::Up).then_some(()));
        self
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.link_a.close();
        self.link_b.close();
        self.hold_fences.store(false, Ordering::SeqCst);
        *self.log_a.relay.lock() = None;
        *self.log_b.relay.lock() = None;
        for relay in self.relays.drain(..) {
            let _ = relay.join();
        }
    }
}

/// Carries one side's fence requests and answers to the other, as the control plane does.
fn relay(log: &Arc<Log>, other: &Arc<dyn Link>, hold: &Arc<AtomicBool>) -> JoinHandle<()> {
    let (sender, receiver) = mpsc::channel();
    *log.relay.lock() = Some(sender);
    let (other, hold) = (other.clone(), hold.clone());
    std::thread::spawn(move || {
        for event in receiver {
            while hold.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            match event {
                LinkEvent::LaneLost { lane, chunks, .. } => other.fence_lane(lane, chunks),
                LinkEvent::LaneFenced { lane, chunks } => other.lane_fenced(lane, chunks),
                _ => {}
            }
        }
    })
}

/// A transfer to submit.
pub struct Push {
    pub id: TransferId,
    pub gate: Arc<Gate>,
    pub spec: SendSpec,
    pub part: SendPart,
}

impl Push {
    pub fn new(id: u64, slot: (SlotId, Generation), regions: &Arc<[Arc<Region>]>, stream: Arc<dyn ByteStream>) -> Push {
        let gate = Gate::new();
        Push {
            id: TransferId(id),
            gate: gate.clone(),
            spec: SendSpec {
                id: TransferId(id),
                slot: slot.0,
                generation: slot.1,
                gate,
                regions: regions.clone(),
                message: None,
                priority: 0,
                deadline: None,
                checksum: false,
                remote: None,
            },
            part: SendPart {
                part: 0,
                extent: PartExtent::WHOLE,
                stream,
                remote: None,
            },
        }
    }

    pub fn message(mut self, message: &[u8]) -> Push {
        self.spec.message = Some(message.into());
        self
    }

    pub fn checksum(mut self) -> Push {
        self.spec.checksum = true;
        self
    }

    pub fn submit(self, link: &Arc<dyn Link>) -> (TransferId, Arc<Gate>) {
        link.submit(self.spec).unwrap();
        link.add_part(self.id, self.part);
        (self.id, self.gate)
    }
}

/// A region list of one host region.
pub fn host(bytes: u64) -> Arc<[Arc<Region>]> {
    Arc::new([Region::allocate(bytes).unwrap()])
}

/// Bytes that depend on the seed and the place.
pub fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(bytes);
    out
}

/// Writes bytes into a stream's place, in stream order.
pub fn write_stream(regions: &[Arc<Region>], stream: &dyn ByteStream, bytes: &[u8]) {
    let mut segments = Vec::new();
    stream.segments(0, bytes.len() as u64, usize::MAX, &mut segments);
    let mut at = 0;
    for segment in segments {
        let end = at + segment.length as usize;
        regions[segment.region as usize]
            .copy_in(segment.offset, &bytes[at..end])
            .unwrap();
        at = end;
    }
    assert_eq!(at, bytes.len());
}

/// Reads a stream's bytes, in stream order.
pub fn read_stream(regions: &[Arc<Region>], stream: &dyn ByteStream) -> Vec<u8> {
    let mut segments = Vec::new();
    stream.segments(0, stream.length(), usize::MAX, &mut segments);
    let mut bytes = vec![0; stream.length() as usize];
    let mut at = 0;
    for segment in segments {
        let end = at + segment.length as usize;
        regions[segment.region as usize]
            .copy_out(segment.offset, &mut bytes[at..end])
            .unwrap();
        at = end;
    }
    bytes
}

/// Distinct random places for `count` pieces of `length` bytes in `pool` bytes.
pub fn random_pieces(seed: u64, pool: u64, count: usize, length: u64) -> Pieces {
    let slots = (pool / length) as usize;
    assert!(count <= slots);
    let mut order: Vec<u64> = (0..slots as u64).collect();
    let mut state = seed | 1;
    for index in (1..slots).rev() {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        order.swap(index, ((state >> 33) % (index as u64 + 1)) as usize);
    }
    Pieces {
        region: 0,
        offsets: order[..count].iter().map(|slot| slot * length).collect(),
        length,
    }
}

/// What a test runs in: host memory or a domain without a host view, over IPv4 or IPv6.
pub struct World {
    pub ip: IpAddr,
    pub staged: Option<Arc<StagedMemory>>,
}

impl World {
    pub fn new(ip: IpAddr, staged: bool) -> World {
        World {
            ip,
            staged: staged.then(|| StagedMemory::new(Duration::from_micros(300), 7).unwrap()),
        }
    }

    pub fn region(&self, bytes: u64) -> Arc<Region> {
        match &self.staged {
            Some(domain) => domain.allocate(bytes).unwrap(),
            None => Region::allocate(bytes).unwrap(),
        }
    }

    pub fn regions(&self, bytes: u64) -> Arc<[Arc<Region>]> {
        Arc::new([self.region(bytes)])
    }

    pub fn pair(&self, config: TcpConfig) -> Pair {
        Pair::with(config.clone(), config, self.ip, None).up()
    }

    pub fn through(&self, config: TcpConfig, proxy: &Proxy) -> Pair {
        Pair::with(config.clone(), config, self.ip, Some(&|target| proxy.to(target))).up()
    }

    pub fn proxy(&self) -> Proxy {
        Proxy::new(self.ip)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(domain) = &self.staged
            && !std::thread::panicking()
        {
            assert_eq!(domain.violations(), Vec::<String>::new());
            assert!(domain.copies_done() > 0, "the staged path was not taken");
        }
    }
}

/// Makes a test of each function, in every world.
#[macro_export]
macro_rules! in_every_world {
    ($($name:ident),* $(,)?) => {
        mod host_ipv4 { $( #[test] fn $name() { super::$name(&super::World::new(super::v4(), false)); } )* }
        mod host_ipv6 { $( #[test] fn $name() { super::$name(&super::World::new(super::v6(), false)); } )* }
        mod staged_ipv4 { $( #[test] fn $name() { super::$name(&super::World::new(super::v4(), true)); } )* }
        mod staged_ipv6 { $( #[test] fn $name() { super::$name(&super::World::new(super::v6(), true)); } )* }
    };
}

/// A TCP relay between a dialing transport and a listener, which can stall and cut what it carries.
pub struct Proxy {
    pub address: SocketAddr,
    state: Arc<ProxyState>,
    listener: Mutex<Option<TcpListener>>,
}

struct ProxyState {
    /// Bytes towards the listener that may pass, over all connections.
    allowance: AtomicU64,
    passed: AtomicU64,
    connections: Mutex<Vec<(TcpStream, TcpStream)>>,
    stopping: AtomicBool,
}

impl Proxy {
    pub fn new(ip: IpAddr) -> Proxy {
        let listener = TcpListener::bind((ip, 0)).unwrap();
        // Small buffers, so that a stalled relay really stalls the sender.
        rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 256 << 10).unwrap();
        Proxy {
            address: listener.local_addr().unwrap(),
            state: Arc::new(ProxyState {
                allowance: AtomicU64::new(u64::MAX),
                passed: AtomicU64::new(0),
                connections: Mutex::default(),
                stopping: AtomicBool::new(false),
            }),
            listener: Mutex::new(Some(listener)),
        }
    }

    /// Starts relaying to this address; gives the relay's own.
    pub fn to(&self, target: SocketAddr) -> SocketAddr {
        let listener = self.listener.lock().take().unwrap();
        let state = self.state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if state.stopping.load(Ordering::SeqCst) {
                    return;
                }
                let (Ok(client), Ok(server)) = (stream, TcpStream::connect(target)) else {
                    continue;
                };
                let _ = (client.set_nodelay(true), server.set_nodelay(true));
                let mut connections = state.connections.lock();
                connections.push((client.try_clone().unwrap(), server.try_clone().unwrap()));
                drop(connections);
                let (client2, server2, state2) =
                    (client.try_clone().unwrap(), server.try_clone().unwrap(), state.clone());
                std::thread::spawn(move || state2.carry(client, server, true));
                let state2 = state.clone();
                std::thread::spawn(move || state2.carry(server2, client2, false));
            }
        });
        self.address
    }

    /// Lets this many more bytes pass towards the listener, then stalls.
    pub fn stall_after(&self, bytes: u64) {
        let passed = self.state.passed.load(Ordering::SeqCst);
        self.state.allowance.store(passed + bytes, Ordering::SeqCst);
    }

    pub fn resume(&self) {
        self.state.allowance.store(u64::MAX, Ordering::SeqCst);
    }

    pub fn passed(&self) -> u64 {
        self.state.passed.load(Ordering::SeqCst)
    }

    /// Waits until the relay has stalled.
    pub fn stalled(&self) {
        let end = Instant::now() + PATIENCE;
        while self.passed() < self.state.allowance.load(Ordering::SeqCst) {
            assert!(Instant::now() < end, "nothing to stall");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Cuts all connections that there are.
    pub fn cut(&self) -> usize {
        let connections = std::mem::take(&mut *self.state.connections.lock());
        for (client, server) in &connections {
            let _ = client.shutdown(std::net::Shutdown::Both);
            let _ = server.shutdown(std::net::Shutdown::Both);
        }
        connections.len()
    }

    /// Cuts one connection.
    pub fn cut_one(&self) {
        let (client, server) = self.state.connections.lock().remove(0);
        let _ = client.shutdown(std::net::Shutdown::Both);
        let _ = server.shutdown(std::net::Shutdown::Both);
    }
}

impl ProxyState {
    fn carry(&self, mut from: TcpStream, mut to: TcpStream, counted: bool) {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(length) = from.read(&mut bytes) {
            if length == 0 {
                break;
            }
            let mut sent = 0;
            while sent < length {
                let mut step = length - sent;
                if counted {
                    let left = self
                        .allowance
                        .load(Ordering::SeqCst)
                        .saturating_sub(self.passed.load(Ordering::SeqCst));
                    if left == 0 {
                        if self.stopping.load(Ordering::SeqCst) {
                            return;
                        }
                        std::thread::sleep(Duration::from_millis(1));
                        continue;
                    }
                    step = step.min(left as usize);
                }
                if to.write_all(&bytes[sent..sent + step]).is_err() {
                    let _ = from.shutdown(std::net::Shutdown::Both);
                    return;
                }
                sent += step;
                if counted {
                    self.passed.fetch_add(step as u64, Ordering::SeqCst);
                }
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Both);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.stopping.store(true, Ordering::SeqCst);
        self.resume();
        self.cut();
        let _ = TcpStream::connect(self.address);
    }
}

/// Small socket buffers: what is sent is soon held up by who does not read.
pub fn small_buffers() -> TcpConfig {
    TcpConfig {
        send_buffer_bytes: 128 << 10,
        receive_buffer_bytes: 256 << 10,
        ..TcpConfig::default()
    }
}

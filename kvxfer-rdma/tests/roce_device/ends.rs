//! Two connected queue pairs on the first two usable ports (or twice on the only one).

use std::cell::UnsafeCell;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use kvxfer_fake_verbs::FakeFabric;
use kvxfer_rdma::gid::{PeerGid, choose};
use kvxfer_rdma::probe::{Availability, ProbeOptions, probe};
use kvxfer_rdma::topology::{interface_subnets, subnet_of};
use kvxfer_rdma::verbs::{
    Access, Completion, CompletionBuffer, CompletionChannel, CompletionQueue, Context, GidEntry, InitState,
    MemoryRegion, Operation, PathAddress, PortAttributes, ProtectionDomain, QueuePair, QueuePairCapacity, ReceiveState,
    Request, SendState,
};

pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// A usable port.
#[derive(Clone)]
pub(crate) struct Port {
    pub(crate) context: Context,
    pub(crate) number: u8,
    pub(crate) attributes: PortAttributes,
    pub(crate) gids: Vec<GidEntry>,
}

/// Whether the devices are the system's.
pub(crate) fn are_real() -> bool {
    std::env::var_os("SOFT_ROCE").is_some() || std::env::var_os("KVXFER_TEST_DEVICES").is_some()
}

/// The usable ports: on the system's devices if `KVXFER_TEST_DEVICES` names some (`rxe0,rxe1`) or this is a soft-RoCE
/// guest, else of two fake devices. Empty, and a line that says why, if there are none.
pub(crate) fn ports() -> Vec<Port> {
    static FABRIC: OnceLock<FakeFabric> = OnceLock::new();
    if !are_real() {
        return ports_of(Some(FABRIC.get_or_init(|| FakeFabric::new().unwrap()).library_path()));
    }
    let mut ports = ports_of(None);
    if let Ok(names) = std::env::var("KVXFER_TEST_DEVICES") {
        ports.retain(|port| names.split(',').any(|name| name == port.context.name()));
    }
    ports
}

pub(crate) fn ports_of(library: Option<PathBuf>) -> Vec<Port> {
    let found = probe(&ProbeOptions {
        library,
        ..ProbeOptions::default()
    });
    if let Some(error) = found.refusal() {
        println!("skipped: {error}");
        return Vec::new();
    }
    let Availability::Devices { .. } = &found else {
        panic!("{found}");
    };
    found
        .usable()
        .map(|(_, facts, port)| Port {
            context: facts.context.clone(),
            number: port.number,
            attributes: port.attributes.clone().unwrap(),
            gids: port.gids.clone(),
        })
        .collect()
}

/// Two ports that reach each other, or `None` if there is none at all.
pub(crate) fn two_ports() -> Option<[Port; 2]> {
    pair_of(ports())
}

pub(crate) fn pair_of(ports: Vec<Port>) -> Option<[Port; 2]> {
    let first = ports.first()?.clone();
    // Another port on the first one's network, else any, else the same.
    let networks = interface_subnets();
    let network = |port: &Port| port.gids.iter().find_map(|gid| subnet_of(gid, &networks));
    let others = || ports.iter().skip(1);
    let near = others().find(|port| network(port).is_some() && network(port) == network(&first));
    let second = near.or(others().next()).unwrap_or(&first).clone();
    Some([first, second])
}

/// One end of a connection.
pub(crate) struct End {
    pub(crate) port: Port,
    pub(crate) domain: ProtectionDomain,
    pub(crate) channel: CompletionChannel,
    pub(crate) sends: CompletionQueue,
    pub(crate) receives: CompletionQueue,
    pub(crate) pair: QueuePair,
    pub(crate) peer_address: Option<PathAddress>,
}

pub(crate) const CAPACITY: QueuePairCapacity = QueuePairCapacity {
    send_requests: 16,
    receive_requests: 16,
    send_segments: 4,
    receive_segments: 1,
    inline_bytes: 0,
};

impl End {
    pub(crate) fn new(port: &Port) -> End {
        End::in_domain(port, &ProtectionDomain::new(&port.context).unwrap())
    }

    pub(crate) fn in_domain(port: &Port, domain: &ProtectionDomain) -> End {
        let domain = domain.clone();
        let channel = CompletionChannel::new(&port.context).unwrap();
        let sends = CompletionQueue::new(&port.context, 64, Some(&channel)).unwrap();
        let receives = CompletionQueue::new(&port.context, 64, Some(&channel)).unwrap();
        let pair = QueuePair::new(&domain, &sends, &receives, CAPACITY).unwrap();
        assert!(pair.capacity().send_requests >= CAPACITY.send_requests);
        End {
            port: port.clone(),
            domain,
            channel,
            sends,
            receives,
            pair,
            peer_address: None,
        }
    }

    pub(crate) fn init(&self) {
        let init = InitState {
            port: self.port.number,
            pkey_index: 0,
            remote_write: true,
            remote_read: true,
        };
        self.pair.to_init(&init).unwrap();
    }

    /// Memory of ours on this end, registered.
    pub(crate) fn memory(&self, bytes: usize, access: Access) -> Memory {
        let mut bytes = vec![0u8; bytes].into_boxed_slice();
        let address = bytes.as_mut_ptr() as u64;
        // SAFETY: the memory is owned by `Memory`, which drops the registration first, and is read and written only
        // through raw copies while it is registered.
        let region = unsafe { self.domain.register(address, bytes.len() as u64, access) }.unwrap();
        Memory {
            region,
            address,
            bytes: UnsafeCell::new(bytes),
        }
    }

    pub(crate) fn receive_state(&self, peer_qp: u32, peer_psn: u32) -> ReceiveState {
        ReceiveState {
            peer_qp,
            peer_psn,
            mtu: self.port.attributes.active_mtu,
            address: self.peer_address.unwrap(),
            max_dest_rd_atomic: 4,
            min_rnr_timer: 12,
        }
    }

    pub(crate) fn send_state(&self, psn: u32) -> SendState {
        SendState {
            psn,
            timeout: 14,
            retry_count: 7,
            rnr_retry: 1,
            max_rd_atomic: 4,
        }
    }

    /// Points this end at a peer's port.
    pub(crate) fn aim(&mut self, peer: &Port) {
        let theirs: Vec<PeerGid> = peer
            .gids
            .iter()
            .map(|entry| PeerGid {
                gid: entry.gid,
                kind: entry.kind,
            })
            .collect();
        let choice = choose(&self.port.gids, self.port.attributes.link_layer, None, &theirs);
        let local = choice
            .local
            .unwrap_or_else(|| panic!("no GID reaches the peer:\n{}", choice.table()));
        self.peer_address = Some(PathAddress {
            lid: peer.attributes.lid,
            gid: choice.routed.then(|| theirs[choice.peer.unwrap()].gid),
            gid_index: local.index,
            service_level: 0,
            traffic_class: 0,
            hop_limit: 64,
            port: self.port.number,
            flow_label: 0,
        });
    }
}

/// Two ends that can send to each other.
pub(crate) fn connected(ports: &[Port; 2]) -> [End; 2] {
    connect([End::new(&ports[0]), End::new(&ports[1])], ports)
}

/// The same, both in one protection domain of their device.
pub(crate) fn connected_in(domain: &ProtectionDomain, ports: &[Port; 2]) -> [End; 2] {
    connect(
        [End::in_domain(&ports[0], domain), End::in_domain(&ports[1], domain)],
        ports,
    )
}

fn connect(mut ends: [End; 2], ports: &[Port; 2]) -> [End; 2] {
    let psn = [0x12_3456, 0xff_fff0];
    for side in 0..2 {
        ends[side].aim(&ports[1 - side]);
        ends[side].init();
    }
    for side in 0..2 {
        let receive = ends[side].receive_state(ends[1 - side].pair.number(), psn[1 - side]);
        ends[side].pair.to_receive(&receive).unwrap();
    }
    for side in 0..2 {
        ends[side].pair.to_send(&ends[side].send_state(psn[side])).unwrap();
    }
    ends
}

/// Registered memory of the test's own.
pub(crate) struct Memory {
    // Before the bytes: the registration goes first.
    pub(crate) region: MemoryRegion,
    pub(crate) address: u64,
    bytes: UnsafeCell<Box<[u8]>>,
}

impl Memory {
    pub(crate) fn fill(&self, with: impl Fn(usize) -> u8) {
        // SAFETY: the tests use each memory from one thread; the device does not touch it meanwhile.
        let bytes = unsafe { &mut *self.bytes.get() };
        bytes
            .iter_mut()
            .enumerate()
            .for_each(|(index, byte)| *byte = with(index));
    }

    pub(crate) fn read(&self) -> Vec<u8> {
        // SAFETY: as in `fill`.
        unsafe { (*self.bytes.get()).to_vec() }
    }
}

/// The next `count` completions of a queue.
pub(crate) fn completions(queue: &CompletionQueue, count: usize) -> Vec<Completion> {
    let deadline = Instant::now() + LIMIT;
    let mut buffer = CompletionBuffer::new(8);
    let mut found = Vec::new();
    while found.len() < count {
        assert!(
            Instant::now() < deadline,
            "{} of {count} completions: {found:?}",
            found.len()
        );
        if queue.poll(&mut buffer).unwrap() == 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
        found.extend(buffer.iter());
    }
    assert_eq!(found.len(), count, "{found:?}");
    found
}

pub(crate) fn pattern(seed: usize) -> impl Fn(usize) -> u8 {
    move |index| (index.wrapping_mul(31).wrapping_add(seed.wrapping_mul(97)) ^ (index >> 8)) as u8
}

/// A work request whose completion is reported.
pub(crate) fn request(wr_id: u64, operation: Operation, remote_address: u64, rkey: u32) -> Request {
    Request {
        wr_id,
        operation,
        remote_address,
        rkey,
        signalled: true,
        fence: false,
    }
}

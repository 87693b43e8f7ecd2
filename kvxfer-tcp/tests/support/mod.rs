//! Two TCP endpoints without a control plane: listeners, what is between them, and the memory they run in.
// Each test binary uses a part of it.
#![allow(dead_code, unreachable_pub, unused_imports, clippy::unwrap_used)]

mod proxy;

use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvxfer_core::Error;
use kvxfer_core::flow::SlotTable;
use kvxfer_core::memory::Region;
use kvxfer_core::transport::Transport;
use kvxfer_core::wire::lane::{HELLO_BYTES, LaneHello};
use kvxfer_tcp::{TcpConfig, TcpTransport};
use kvxfer_testkit::gpus::Gpus;
use kvxfer_testkit::staged::StagedMemory;
use kvxfer_testkit::transport::{self, Ends};
use parking_lot::Mutex;

pub use kvxfer_testkit::transport::*;
pub use proxy::Proxy;

/// One endpoint and its listener.
pub struct Node {
    node: transport::Node<TcpTransport>,
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
        let mut node = transport::Node::new(bits, slots, transport.clone());
        node.addresses.push(address);
        let stopping = Arc::new(AtomicBool::new(false));
        let refused = Arc::new(Mutex::new(Vec::new()));
        let thread = {
            let (stopping, refused) = (stopping.clone(), refused.clone());
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
            node,
            address,
            stopping,
            listener: Some(thread),
            refused,
        }
    }
}

impl Deref for Node {
    type Target = transport::Node<TcpTransport>;

    fn deref(&self) -> &Self::Target {
        &self.node
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

/// Two nodes and the link between them, which the left one dials.
pub struct Pair {
    // Before the nodes: it ends first.
    ends: Ends,
    pub left: Node,
    pub right: Node,
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
        Pair::with(config, v4(), None)
    }

    /// `via` is where the left node dials instead of the right one itself.
    pub fn with(config: TcpConfig, ip: IpAddr, via: Option<&dyn Fn(SocketAddr) -> SocketAddr>) -> Pair {
        let left = Node::new(0xa, config.clone(), ip);
        let right = Node::new(0xb, config, ip);
        Pair::between(left, right, via, TOKEN)
    }

    pub fn between(left: Node, right: Node, via: Option<&dyn Fn(SocketAddr) -> SocketAddr>, token: u128) -> Pair {
        let mut to_right = right.peer(&left, token, true);
        if let Some(via) = via {
            to_right.addresses = vec![via(right.address)];
        }
        let to_left = left.peer(&right, token, false);
        Pair {
            ends: Ends::join(&left, to_right, &right, to_left),
            left,
            right,
        }
    }

    pub fn up(self) -> Pair {
        self.ends.up();
        self
    }
}

impl Deref for Pair {
    type Target = Ends;

    fn deref(&self) -> &Ends {
        &self.ends
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.ends.close();
    }
}

/// A region list of one host region.
pub fn host(bytes: u64) -> Arc<[Arc<Region>]> {
    Arc::new([Region::allocate(bytes).unwrap()])
}

/// What a test runs in: a kind of memory, over IPv4 or IPv6.
pub struct World {
    pub ip: IpAddr,
    pub memory: Kind,
}

/// What memory the regions are in.
pub enum Kind {
    Host,
    /// A domain without a host view.
    Staged(Arc<StagedMemory>),
    /// Fake GPUs: each region on another device than the one before.
    Cuda(Gpus),
    /// The same, and every other region is the host's.
    Mixed(Gpus, AtomicUsize),
}

impl Kind {
    pub fn host() -> Kind {
        Kind::Host
    }

    pub fn staged() -> Kind {
        Kind::Staged(StagedMemory::new(Duration::from_micros(300), 7).unwrap())
    }

    pub fn cuda() -> Kind {
        Kind::Cuda(Gpus::new(&[]))
    }

    pub fn mixed() -> Kind {
        Kind::Mixed(Gpus::new(&[]), AtomicUsize::new(0))
    }
}

impl World {
    pub fn new(ip: IpAddr, memory: Kind) -> World {
        World { ip, memory }
    }

    pub fn region(&self, bytes: u64) -> Arc<Region> {
        match &self.memory {
            Kind::Host => Region::allocate(bytes).unwrap(),
            Kind::Staged(domain) => domain.allocate(bytes).unwrap(),
            Kind::Cuda(gpus) => gpus.region(bytes),
            Kind::Mixed(gpus, count) => match count.fetch_add(1, Ordering::SeqCst) % 2 {
                0 => gpus.region(bytes),
                _ => Region::allocate(bytes).unwrap(),
            },
        }
    }

    pub fn regions(&self, bytes: u64) -> Arc<[Arc<Region>]> {
        Arc::new([self.region(bytes)])
    }

    pub fn pair(&self, config: TcpConfig) -> Pair {
        Pair::with(config, self.ip, None).up()
    }

    pub fn through(&self, config: TcpConfig, proxy: &Proxy) -> Pair {
        Pair::with(config, self.ip, Some(&|target| proxy.to(target))).up()
    }

    pub fn proxy(&self) -> Proxy {
        Proxy::new(self.ip)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        match &mut self.memory {
            Kind::Host => {}
            Kind::Staged(domain) => {
                assert_eq!(domain.violations(), Vec::<String>::new());
                assert!(domain.copies_done() > 0, "the staged path was not taken");
            }
            Kind::Cuda(gpus) | Kind::Mixed(gpus, _) => {
                gpus.end_well();
                assert!(gpus.fake.count("copies") > 0, "no copy was made");
            }
        }
    }
}

/// Makes a test of each function, in every world.
#[macro_export]
macro_rules! in_every_world {
    ($($name:ident),* $(,)?) => {
        $crate::in_world!(host_ipv4, v4, host, $($name),*);
        $crate::in_world!(host_ipv6, v6, host, $($name),*);
        $crate::in_world!(staged_ipv4, v4, staged, $($name),*);
        $crate::in_world!(staged_ipv6, v6, staged, $($name),*);
        $crate::in_world!(cuda, v4, cuda, $($name),*);
        $crate::in_world!(cuda_and_host, v4, mixed, $($name),*);
    };
}

/// The same, in one.
#[macro_export]
macro_rules! in_world {
    ($world:ident, $ip:ident, $kind:ident, $($name:ident),*) => {
        mod $world {
            $( #[test] fn $name() { super::$name(&super::World::new(super::$ip(), super::Kind::$kind())); } )*
        }
    };
}

/// Small socket buffers: what is sent is soon held up by who does not read.
pub fn small_buffers() -> TcpConfig {
    TcpConfig {
        send_buffer_bytes: 128 << 10,
        receive_buffer_bytes: 256 << 10,
        ..TcpConfig::default()
    }
}

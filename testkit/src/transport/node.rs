//! One endpoint: a transport, its slots, and memory that it has registered.

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;

use kvxfer_core::flow::{ByteStream, Close, SlotTable, SlotWatcher};
use kvxfer_core::memory::Region;
use kvxfer_core::transport::{Link, LinkPeer, RegionAccess, Registered, Transport};
use kvxfer_core::{Generation, Incarnation, PoolId, SlotId};

use super::{Arrival, Stream, StreamTarget, paint_stream, pattern, read_stream, until};
use crate::touch;

/// One endpoint: a transport and its slots.
pub struct Node<T> {
    /// Whose messages and lanes these are.
    pub incarnation: Incarnation,
    /// What the transport places, or lets the peer place.
    pub slots: Arc<SlotTable>,
    /// The transport under test.
    pub transport: Arc<T>,
    /// Where it listens, if it does.
    pub addresses: Vec<SocketAddr>,
}

impl<T: Transport> Node<T> {
    /// With these bits as its incarnation.
    pub fn new(bits: u128, slots: Arc<SlotTable>, transport: Arc<T>) -> Node<T> {
        Node {
            incarnation: Incarnation::from_bits(bits),
            slots,
            transport,
            addresses: Vec::new(),
        }
    }

    /// Host memory of these lengths, registered to be read and written by peers.
    pub fn memory(&self, lengths: &[u64]) -> Memory {
        let allocate = |length: &u64| Region::allocate(*length).unwrap();
        self.memory_of(lengths.iter().map(allocate).collect())
    }

    /// These regions, registered to be read and written by peers.
    pub fn memory_of(&self, regions: Vec<Arc<Region>>) -> Memory {
        let regions: Arc<[Arc<Region>]> = regions.into();
        let access = RegionAccess {
            serves: true,
            receives: true,
        };
        let registered = self.transport.register(&regions, access).unwrap();
        Memory { regions, registered }
    }

    /// The other side's view of this node.
    pub fn peer(&self, local: &Node<T>, token: u128, dials: bool) -> LinkPeer {
        LinkPeer {
            incarnation: self.incarnation,
            local: local.incarnation,
            addresses: self.addresses.clone(),
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
        let target = Box::new(StreamTarget { stream });
        self.slots
            .open_target(target, regions.clone(), None, PoolId(0), watcher)
            .unwrap()
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

    /// Payload bytes that this side has sent; of one-sided writes, those that its device knows to be acknowledged.
    pub fn written(&self) -> u64 {
        self.moved("sent")
    }

    /// Payload bytes that went one way: `sent`, `received`, or `read`.
    pub fn moved(&self, direction: &str) -> u64 {
        self.counter_where("rail_bytes_total", |labels| {
            labels.contains(&("direction", direction.into()))
        })
    }
}

/// Memory that a node has registered.
pub struct Memory {
    /// The regions, by index.
    pub regions: Arc<[Arc<Region>]>,
    /// What keeps them registered, and the keys for peers.
    pub registered: Registered,
}

/// So that it stands wherever its regions do.
impl Deref for Memory {
    type Target = Arc<[Arc<Region>]>;

    fn deref(&self) -> &Arc<[Arc<Region>]> {
        &self.regions
    }
}

impl Memory {
    /// What a peer needs to reach it one-sidedly.
    pub fn keys(&self) -> Arc<[u8]> {
        self.registered.keys.clone().into()
    }

    /// Fills a region with bytes that depend on the seed.
    pub fn fill(&self, region: usize, seed: u64) {
        let bytes = pattern(seed, self.regions[region].length() as usize);
        touch::put(&self.regions[region], 0, &bytes).unwrap();
    }

    /// The bytes of a stream.
    pub fn bytes(&self, stream: &Stream) -> Vec<u8> {
        read_stream(&self.regions, &**stream)
    }

    /// Whether all bytes of a stream are this one.
    pub fn is_all(&self, stream: &Stream, byte: u8) -> bool {
        self.bytes(stream).iter().all(|&other| other == byte)
    }

    /// Puts the same byte everywhere in a stream.
    pub fn paint(&self, stream: &Stream, byte: u8) {
        paint_stream(&self.regions, &**stream, byte);
    }

    /// Bytes of one region.
    pub fn read(&self, region: usize, offset: u64, length: usize) -> Vec<u8> {
        let mut out = vec![0; length];
        touch::get(&self.regions[region], offset, &mut out).unwrap();
        out
    }
}

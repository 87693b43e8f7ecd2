//! A link: the rails to one peer and what they share. Calls come from any thread and never block.

mod admission;
mod handle;
mod life;
mod messages;
mod reports;
mod revocation;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use kvxfer_core::flow::{ChunkName, LaneName, LinkSender, SlotTable, TransferId};
use kvxfer_core::memory::Region;
use kvxfer_core::transport::{InTurn, LinkEvent, LinkPeer, LinkWatcher};
use kvxfer_core::{Error, Time};
use parking_lot::Mutex;

use crate::advert::Advert;
use crate::clock;
use crate::config::RdmaConfig;
use crate::counters::RailCounters;
use crate::engine::{EngineShared, Task};
use crate::inbound::Inbound;
use crate::message::{LinkMessage, Outbox};
use crate::outbound::{Outbound, TransferKeys};
use crate::registry::RegionKeys;
use crate::transport::Shared;

pub(crate) use handle::RdmaLink;
use life::Life;
use revocation::Fences;
pub(crate) use revocation::Flushing;

/// What the rails of a link share among them and with callers.
pub(crate) struct LinkCore {
    /// Its number, unique in the transport.
    pub(crate) id: u64,
    pub(crate) peer: LinkPeer,
    pub(crate) peer_advert: Advert,
    pub(crate) config: Arc<RdmaConfig>,
    pub(crate) slots: Arc<SlotTable>,
    pub(crate) sender: Mutex<LinkSender>,
    pub(crate) rails: Box<[Rail]>,
    pub(crate) inbound: Inbound,
    pub(crate) outbound: Outbound,
    pub(crate) rails_up: AtomicUsize,
    /// Some rail was up once, and `Up` was said.
    pub(crate) was_up: AtomicBool,
    /// Until then a link without a rail is being made, or waits for one to come back; after it, it has failed.
    no_rail_limit: Mutex<Time>,
    life: Mutex<Life>,
    transport: Arc<Shared>,
    watcher: Arc<dyn LinkWatcher>,
    outbox: Mutex<Outbox>,
    // Bodies are emitted by one thread at a time, so that their order is kept.
    posting: Mutex<()>,
    reports: InTurn,
    fences: Mutex<Fences>,
}

/// One rail: a pair of ports, and the queue pair between them while there is one.
pub(crate) struct Rail {
    pub(crate) index: u16,
    /// Which engine owns it, and which port; the dialer knows at once, the acceptor when it is told.
    pub(crate) place: OnceLock<RailPlace>,
    pub(crate) kicked: AtomicBool,
    pub(crate) mail: Mutex<VecDeque<Mail>>,
    /// For people, while it is up.
    pub(crate) name: Mutex<Option<String>>,
    pub(crate) counters: RailCounters,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct RailPlace {
    pub(crate) engine: usize,
    /// Index in our advert.
    pub(crate) own_port: u16,
    /// Index in the peer's advert.
    pub(crate) peer_port: u16,
}

/// What a rail's engine is told.
#[derive(Debug)]
pub(crate) enum Mail {
    Message(LinkMessage),
    /// The peer asks for the fence of a lane.
    Fence(LaneName, Vec<ChunkName>),
    /// The rail's device is to be flushed, for a slot that is written no more.
    Flush(Arc<Flushing>),
    /// Give the rail's queue pair up, whatever its epoch.
    Fail(Error),
}

impl LinkCore {
    pub(crate) fn new(
        id: u64,
        peer: LinkPeer,
        peer_advert: Advert,
        transport: Arc<Shared>,
        watcher: Arc<dyn LinkWatcher>,
    ) -> Arc<LinkCore> {
        let config = transport.config.clone();
        let lanes = config.rails_max;
        Arc::new(LinkCore {
            id,
            sender: Mutex::new(LinkSender::new(config.sender(lanes))),
            rails: (0..lanes).map(Rail::new).collect(),
            inbound: Inbound::default(),
            outbound: Outbound::default(),
            rails_up: AtomicUsize::new(0),
            was_up: AtomicBool::new(false),
            no_rail_limit: Mutex::new(clock::now() + config.setup_limit),
            life: Mutex::default(),
            slots: transport.slots.clone(),
            peer,
            peer_advert,
            config,
            transport,
            watcher,
            outbox: Mutex::default(),
            posting: Mutex::new(()),
            reports: InTurn::default(),
            fences: Mutex::default(),
        })
    }

    pub(crate) fn engine(&self, index: usize) -> &Arc<EngineShared> {
        &self.transport.engines[index]
    }

    pub(crate) fn lane_place(&self, lane: LaneName) -> String {
        format!("rail {}.{} to {}", lane.index, lane.epoch, self.peer.incarnation)
    }

    /// Reports something, with no lock held that a caller of [`Link`](kvxfer_core::transport::Link) may wait for.
    pub(crate) fn emit(&self, event: LinkEvent) {
        self.watcher.link_event(self.peer.incarnation, event);
    }

    /// Has a rail's engine look at it.
    pub(crate) fn kick(self: &Arc<Self>, rail: &Rail) {
        if let Some(place) = rail.place.get()
            && !rail.kicked.swap(true, Ordering::SeqCst)
        {
            self.engine(place.engine).push(Task::Rail(self.clone(), rail.index));
        }
    }

    pub(crate) fn kick_all(self: &Arc<Self>) {
        for rail in &self.rails {
            self.kick(rail);
        }
    }

    pub(crate) fn kick_those_with_work(self: &Arc<Self>) {
        let sender = self.sender.lock();
        // A mask, so that the lock is not held while threads are woken.
        let work = self
            .rails
            .iter()
            .filter(|rail| sender.has_work(rail.index))
            .fold(0u64, |mask, rail| mask | 1 << rail.index);
        drop(sender);
        for rail in self.rails.iter().filter(|rail| work & (1 << rail.index) != 0) {
            self.kick(rail);
        }
    }

    /// Whether no device was given some of these regions.
    pub(crate) fn is_staged(&self, regions: &[Arc<Region>]) -> bool {
        let registry = &self.transport.registry;
        let staged = |region: &Arc<Region>| registry.local(region).is_some_and(|keys| keys.is_staged());
        regions.iter().any(staged)
    }

    /// A region that peers may read, by the number of its registration.
    pub(crate) fn served(&self, id: u64) -> Option<Arc<RegionKeys>> {
        self.transport.registry.served(id)
    }

    /// A transfer's own memory cannot be used: nothing more of it is started, and its owner ends it.
    pub(crate) fn memory_failed(&self, transfer: TransferId, error: Error) {
        tracing::warn!(transfer = transfer.0, %error, "a transfer's memory has failed");
        self.sender.lock().halt(transfer);
        self.emit(LinkEvent::MemoryFailed { transfer, error });
    }

    /// What a chunk's transfer needs to know of both sides' memory.
    pub(crate) fn keys(&self, id: TransferId) -> Option<Arc<TransferKeys>> {
        self.outbound.keys(id)
    }
}

impl Rail {
    fn new(index: u16) -> Rail {
        Rail {
            index,
            place: OnceLock::new(),
            kicked: AtomicBool::new(false),
            mail: Mutex::default(),
            name: Mutex::default(),
            counters: RailCounters::default(),
        }
    }
}

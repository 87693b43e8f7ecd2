//! A link: the lanes to one peer and what they share. Calls come from any thread and never block.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use kvxfer_core::flow::{ChunkName, ChunkState, Gate, LaneName, LinkSender, SendPart, SendSpec, SlotTable, TransferId};
use kvxfer_core::transport::{InTurn, Link, LinkEvent, LinkPeer, LinkWatcher, Path};
use kvxfer_core::{Error, Result};
use parking_lot::Mutex;

use crate::config::TcpConfig;
use crate::error::{LanePlace, TcpError};
use crate::exports::{ExportTable, Exports};
use crate::imports::Imports;
use crate::lane::LaneShared;
use crate::send::{Filler, Sent};
use crate::sys;
use crate::worker::WorkerShared;

/// No transfer.
const NONE: u64 = u64::MAX;

/// What the lanes of a link share among them and with callers.
pub(crate) struct LinkCore {
    pub(crate) peer: LinkPeer,
    pub(crate) config: Arc<TcpConfig>,
    pub(crate) slots: Arc<SlotTable>,
    pub(crate) sender: Mutex<LinkSender>,
    pub(crate) lanes: Box<[LaneShared]>,
    pub(crate) exports: Exports,
    pub(crate) imports: Imports,
    /// Passed around each call that reads or writes blocks: [`Link::close`] closes it.
    pub(crate) open: Arc<Gate>,
    /// Lanes that are up.
    pub(crate) lanes_up: AtomicUsize,
    /// Lanes that have not ended yet, after `close`.
    pub(crate) lanes_left: AtomicUsize,
    workers: Arc<[Arc<WorkerShared>]>,
    watcher: Arc<dyn LinkWatcher>,
    reports: InTurn,
    // The transfer that was submitted last, if nothing else had work then: it may be sent by the submitting thread.
    lone_transfer: AtomicU64,
}

/// How a link's lanes are laid out.
pub(crate) struct Lanes {
    pub(crate) count: u16,
    pub(crate) first_worker: usize,
    pub(crate) workers: Arc<[Arc<WorkerShared>]>,
}

impl LinkCore {
    /// `exports`: what a peer on this host may map; `None` for one that is elsewhere.
    pub(crate) fn new(
        peer: LinkPeer,
        config: Arc<TcpConfig>,
        slots: Arc<SlotTable>,
        lanes: Lanes,
        exports: Option<Arc<ExportTable>>,
        watcher: Arc<dyn LinkWatcher>,
    ) -> Arc<LinkCore> {
        let Lanes {
            count: lanes,
            first_worker,
            workers,
        } = lanes;
        let lane = |index: u16| LaneShared::new(index, (first_worker + usize::from(index)) % workers.len());
        Arc::new(LinkCore {
            sender: Mutex::new(LinkSender::new(config.sender(lanes))),
            lanes: (0..lanes).map(lane).collect(),
            exports: Exports::new(exports),
            imports: Imports::default(),
            open: Gate::new(),
            lanes_up: AtomicUsize::new(0),
            lanes_left: AtomicUsize::new(usize::from(lanes)),
            peer,
            config,
            slots,
            workers,
            watcher,
            reports: InTurn::default(),
            lone_transfer: AtomicU64::new(NONE),
        })
    }

    pub(crate) fn place(&self, lane: LaneName) -> LanePlace {
        LanePlace {
            peer: self.peer.incarnation,
            lane,
        }
    }

    /// Reports something. Only on data threads, with no lock held that a caller of [`Link`] may wait for.
    pub(crate) fn emit(&self, event: LinkEvent) {
        self.watcher.link_event(self.peer.incarnation, event);
    }

    /// Reports what the sender has to say, in order. Only on data threads.
    pub(crate) fn report(&self) {
        self.reports.report(
            || self.sender.lock().poll_event(),
            |event| self.emit(LinkEvent::Send(event)),
        );
    }

    pub(crate) fn closed(&self) -> bool {
        self.open.is_closed()
    }

    /// Has a lane's data thread look at the lane.
    pub(crate) fn kick(self: &Arc<Self>, lane: &LaneShared) {
        if !lane.kicked.swap(true, Ordering::SeqCst) {
            self.workers[lane.worker].push(self.clone(), lane.index);
        }
    }

    fn kick_all(self: &Arc<Self>) {
        for lane in &self.lanes {
            self.kick(lane);
        }
    }

    fn kick_those_with_work(self: &Arc<Self>) {
        let sender = self.sender.lock();
        // A mask, so that the lock is not held while threads are woken.
        let work = self
            .lanes
            .iter()
            .filter(|lane| sender.has_work(lane.index))
            .fold(0u64, |mask, lane| mask | 1 << lane.index);
        drop(sender);
        for lane in self.lanes.iter().filter(|lane| work & (1 << lane.index) != 0) {
            self.kick(lane);
        }
    }

    /// Sends what waits from this thread if a lane is idle. False if a data thread has to do it.
    fn send_inline(self: &Arc<Self>) -> bool {
        for lane in &self.lanes {
            let Some(mut writer) = lane.writer.try_lock() else {
                continue;
            };
            let idle = writer.idle();
            let mut clean = false;
            if idle {
                let sent = writer.send(self, lane.index, Filler::Submitter, sys::now());
                clean = matches!(sent, Ok(Sent::All)) && !writer.gate_fenced && !writer.settled;
                if let Err(error) = sent {
                    writer.failed = Some(error);
                }
            }
            drop(writer);
            // The lane's thread may have wanted the writer meanwhile; and events, errors and the rest are its to handle.
            let wanted = lane.writer_wanted.swap(false, Ordering::SeqCst);
            if wanted || (idle && !clean) {
                self.kick(lane);
            }
            if idle {
                return clean;
            }
        }
        false
    }

    /// What is copied by whoever receives it, for people.
    fn shared_memory(&self) -> Vec<String> {
        let line = |(mapped, told), who: &str, whose: &str| match (mapped, told) {
            (_, 0usize) => None,
            (mapped, told) => Some(format!(
                "{who} copies out of {mapped} of {whose} {told} device regions by itself"
            )),
        };
        let lines = [
            line(self.exports.counts(), "the peer, on this host,", "our"),
            line(self.imports.counts(), "this side", "the peer's"),
        ];
        lines.into_iter().flatten().collect()
    }

    fn refuse_if_closed(&self) -> Result<()> {
        if self.closed() {
            return Err(Error::from(TcpError::Closed {
                peer: self.peer.incarnation,
            }));
        }
        Ok(())
    }
}

/// The handle that [`Transport::connect`](kvxfer_core::transport::Transport::connect) gives out.
pub(crate) struct TcpLink {
    pub(crate) core: Arc<LinkCore>,
}

impl Link for TcpLink {
    /// Takes the transfer; its message, if any, goes with its first part.
    fn submit(&self, spec: SendSpec) -> Result<()> {
        let core = &self.core;
        core.refuse_if_closed()?;
        let id = spec.id;
        let mut sender = core.sender.lock();
        let busy = core.lanes.iter().any(|lane| sender.has_work(lane.index));
        sender.submit(spec)?;
        drop(sender);
        core.lone_transfer
            .store(if busy { NONE } else { id.0 }, Ordering::Relaxed);
        Ok(())
    }

    fn add_part(&self, id: TransferId, part: SendPart) {
        let core = &self.core;
        if core.closed() {
            return;
        }
        let small = part.stream.length() <= core.config.inline_bytes_max;
        core.sender.lock().add_part(id, part);
        let lone = core.lone_transfer.swap(NONE, Ordering::Relaxed) == id.0;
        if small && lone && core.send_inline() {
            return;
        }
        core.kick_those_with_work();
    }

    fn stop(&self, id: TransferId) {
        let core = &self.core;
        core.sender.lock().stop(id);
        // Every lane: a chunk begun with a gate that is now closed is to be filled up, and the end reported.
        core.kick_all();
    }

    fn forget(&self, id: TransferId) {
        self.core.sender.lock().forget(id);
        self.core.kick_those_with_work();
    }

    fn fence_lane(&self, lane: LaneName, chunks: Vec<ChunkName>) {
        let core = &self.core;
        match core.lanes.get(usize::from(lane.index)) {
            Some(shared) => {
                shared.mail.lock().fences.push((lane, chunks));
                core.kick(shared);
            }
            // No such lane here: nothing of it was ever placed. A lane that exists answers, on its thread.
            None => {
                if let Some(first) = core.lanes.first() {
                    first.mail.lock().fences.push((lane, chunks));
                    core.kick(first);
                }
            }
        }
    }

    fn lane_fenced(&self, lane: LaneName, chunks: Vec<(ChunkName, ChunkState)>) {
        self.core.sender.lock().lane_fenced(lane, &chunks, sys::now());
        self.core.kick_all();
    }

    fn close(&self) {
        self.core.open.close();
        self.core.kick_all();
    }

    fn path(&self) -> Path {
        Path {
            transport: "tcp".into(),
            rails: self
                .core
                .lanes
                .iter()
                .filter_map(|lane| lane.rail.lock().clone())
                .collect(),
            rails_down: self
                .core
                .lanes
                .iter()
                .filter(|lane| lane.rail.lock().is_none())
                .filter_map(|lane| lane.loss.lock().clone())
                .collect(),
            rails_configured: self.core.lanes.len(),
            notes: self.core.shared_memory(),
        }
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        // Whoever lets go of a link without closing it must not leave its lanes behind.
        self.close();
    }
}

//! A lane: one of a link's connections, over all its epochs. What others reach of it, and what its data thread does.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam::utils::CachePadded;
use kvxfer_core::flow::{ChunkName, ChunkState, LaneName};
use kvxfer_core::transport::LinkEvent;
use kvxfer_core::wire::lane::LaneHello;
use kvxfer_core::{Error, Time};
use parking_lot::Mutex;
use rustix::net::Shutdown;

use crate::connect::{self, Dial};
use crate::counters::{LaneCounters, add};
use crate::error::TcpError;
use crate::link::LinkCore;
use crate::receive::{Lent, Reader};
use crate::send::{Filler, Sent, Writer};
use crate::sys::{self, Ready};
use crate::worker::{LANE_ENDED, LANE_NEW, Turn};

/// Bytes that a lane reads in one turn, about: then the other lanes of the thread have theirs.
const TURN_BYTES: usize = 1 << 20;
/// With this many bytes of acknowledgements waiting the lane reads no further chunks: a peer that sends and never
/// reads is held up, not remembered. Far above what an honest peer's window can ask for.
const ACK_BACKLOG_MAX: usize = 256 << 10;

/// What callers and other threads reach of a lane.
pub(crate) struct LaneShared {
    pub(crate) index: u16,
    /// The data thread that owns it.
    pub(crate) worker: usize,
    /// In its thread's queue already.
    pub(crate) kicked: AtomicBool,
    /// Its thread found the writer in use: whoever uses it wakes the thread afterwards.
    pub(crate) writer_wanted: AtomicBool,
    /// It had nothing to send when it last looked.
    pub(crate) idle: AtomicBool,
    /// Its place in its thread; only the thread uses it.
    pub(crate) token: AtomicUsize,
    pub(crate) mail: Mutex<Mail>,
    pub(crate) writer: Mutex<Writer>,
    /// `local-remote` while it is up, for people.
    pub(crate) rail: Mutex<Option<String>>,
    /// Why it was lost last, for people.
    pub(crate) loss: Mutex<Option<String>>,
    pub(crate) counters: CachePadded<LaneCounters>,
}

/// What others want of a lane.
#[derive(Default)]
pub(crate) struct Mail {
    /// A connection that the peer has dialed, and its hello.
    pub(crate) adopted: Option<(OwnedFd, LaneHello)>,
    pub(crate) fences: Vec<(LaneName, Vec<ChunkName>)>,
    /// No connection of this epoch or below is taken any more.
    pub(crate) epoch_floor: u32,
}

impl LaneShared {
    pub(crate) fn new(index: u16, worker: usize) -> LaneShared {
        LaneShared {
            index,
            worker,
            kicked: AtomicBool::new(false),
            writer_wanted: AtomicBool::new(false),
            idle: AtomicBool::new(false),
            token: AtomicUsize::new(LANE_NEW),
            mail: Mutex::new(Mail::default()),
            writer: Mutex::new(Writer::new()),
            rail: Mutex::new(None),
            loss: Mutex::new(None),
            counters: CachePadded::new(LaneCounters::default()),
        }
    }
}

/// A lane, as its data thread holds it.
pub(crate) struct Lane {
    pub(crate) link: Arc<LinkCore>,
    index: u16,
    token: usize,
    phase: Phase,
    /// In the thread's queue of lanes to run.
    pub(crate) queued: bool,
    /// In the thread's list of lanes with copies.
    pub(crate) marked_copying: bool,
    wants_turn: bool,
    /// The socket takes bytes again; the writer is told when it is free.
    write_edge: bool,
    writer_copying: bool,
    writer_starved: bool,
    /// The writer has references that are not settled.
    referring: bool,
    ack_backlog: usize,
    timer: Option<Time>,
    ended: bool,
    /// Highest epoch this side has dialed or heard of.
    epoch: u32,
    backoff: Duration,
    dials: usize,
    /// Fences to answer once nothing of the lane runs any more.
    fences: Vec<(LaneName, Vec<ChunkName>)>,
    adopted: Option<(OwnedFd, LaneHello)>,
}

enum Phase {
    /// No connection. A dialing side has a timer for the next.
    Down {
        redial: Option<Time>,
    },
    Dialing(Dial),
    Up(Box<Reader>, LaneName, Arc<OwnedFd>),
    /// The connection is lost and copies between its staging and blocks still run.
    Draining(Box<Reader>, LaneName, Error),
}

impl Lane {
    pub(crate) fn new(link: Arc<LinkCore>, index: u16, token: usize) -> Lane {
        Lane {
            backoff: link.config.backoff_min,
            index,
            token,
            phase: Phase::Down { redial: None },
            queued: false,
            marked_copying: false,
            wants_turn: false,
            write_edge: false,
            writer_copying: false,
            writer_starved: false,
            referring: false,
            ack_backlog: 0,
            timer: None,
            ended: false,
            epoch: 0,
            dials: 0,
            fences: Vec::new(),
            adopted: None,
            link,
        }
    }

    pub(crate) fn ended(&self) -> bool {
        self.ended
    }

    pub(crate) fn wants_turn(&self) -> bool {
        self.wants_turn
    }

    /// Whether copies run, or wait for staging buffers.
    pub(crate) fn copying(&self) -> bool {
        match &self.phase {
            Phase::Up(reader, ..) => reader.copying() || reader.starved || self.writer_copying,
            Phase::Draining(..) => true,
            Phase::Down { .. } | Phase::Dialing(_) => false,
        }
    }

    /// Whether its copies may wait for others to be started, so that a device gets them together.
    pub(crate) fn copies_can_wait(&self) -> bool {
        matches!(&self.phase, Phase::Up(reader, ..) if !self.writer_copying && reader.copies_can_wait())
    }

    /// Whether staging buffers are missing.
    pub(crate) fn starved(&self) -> bool {
        matches!(&self.phase, Phase::Up(reader, ..) if reader.starved || self.writer_starved)
    }

    pub(crate) fn take_timer(&mut self) -> Option<Time> {
        self.timer.take()
    }

    fn shared(&self) -> &LaneShared {
        &self.link.lanes[usize::from(self.index)]
    }

    /// Somebody wants something of the lane: a connection, a fence, an end, or bytes to be sent.
    pub(crate) fn kicked(&mut self, turn: &Turn<'_>) {
        let (adopted, fences) = {
            let mut mail = self.shared().mail.lock();
            (mail.adopted.take(), std::mem::take(&mut mail.fences))
        };
        if self.link.closed() {
            return self.close(turn);
        }
        if adopted.is_some() {
            self.adopted = adopted;
        }
        for (lane, chunks) in fences {
            self.fence(turn, lane, chunks);
        }
        if let Some((_, hello)) = &self.adopted {
            self.epoch = self.epoch.max(hello.lane.epoch);
            if let Phase::Up(_, name, _) = &self.phase {
                let place = self.link.place(*name);
                self.lose(turn, TcpError::Replaced { place });
            }
        }
        self.settle(turn);
        self.link.report();
        self.wants_turn |= matches!(self.phase, Phase::Up(..));
    }

    /// What epoll said.
    pub(crate) fn ready(&mut self, turn: &Turn<'_>, ready: Ready) {
        match &mut self.phase {
            Phase::Up(reader, ..) => {
                reader.readable |= ready.readable;
                reader.ending |= ready.ending;
                self.write_edge |= ready.writable;
                self.wants_turn = true;
            }
            Phase::Dialing(dial) => match dial.progress(&self.link) {
                Ok(true) => self.dialed(turn),
                Ok(false) => {}
                Err(error) => self.dial_failed(turn, error),
            },
            Phase::Down { .. } | Phase::Draining(..) => {}
        }
    }

    /// A time that the lane asked for has come.
    pub(crate) fn timer(&mut self, turn: &Turn<'_>) {
        match &self.phase {
            Phase::Down { redial: Some(time) } if *time <= turn.now => self.dial(turn),
            Phase::Dialing(dial) if dial.deadline <= turn.now => {
                let place = self.link.place(dial.name);
                let limit_ms = self.link.config.connect_timeout.as_millis() as u64;
                self.dial_failed(turn, TcpError::TimedOut { place, limit_ms });
            }
            _ => {}
        }
    }

    /// Reads, acknowledges and sends, at most about 1 MiB each way.
    pub(crate) fn turn(&mut self, turn: &Turn<'_>) {
        self.wants_turn = false;
        if self.link.closed() {
            return self.close(turn);
        }
        if let Err(error) = self.receive(turn).and_then(|()| self.send(turn)) {
            self.lose(turn, error);
        }
    }

    /// Looks at copies under way. True if one has ended: then the lane wants a turn.
    pub(crate) fn poll_copies(&mut self, turn: &Turn<'_>) -> bool {
        match &mut self.phase {
            Phase::Up(reader, ..) => {
                let mut moved = reader.poll_copies(&self.link);
                if self.writer_copying
                    && let Some(mut writer) = self.link.lanes[usize::from(self.index)].writer.try_lock()
                {
                    moved |= writer.poll_copies(&self.link, turn.now);
                    self.writer_copying = writer.copying();
                }
                // What waits for buffers looks for them each time.
                let starved = reader.starved || self.writer_starved;
                self.wants_turn |= moved || starved;
                moved
            }
            Phase::Draining(..) => {
                self.drain(turn);
                !matches!(self.phase, Phase::Draining(..))
            }
            Phase::Down { .. } | Phase::Dialing(_) => false,
        }
    }

    /// Gives up staging buffers that stand still.
    pub(crate) fn release_staging(&mut self, _turn: &Turn<'_>) {
        if let Phase::Up(reader, ..) = &mut self.phase {
            if !reader.readable {
                reader.flush_staging();
            }
            if let Some(mut writer) = self.shared().writer.try_lock() {
                writer.release_staging();
            }
        }
    }

    fn receive(&mut self, turn: &Turn<'_>) -> Result<(), TcpError> {
        let link = &self.link;
        let shared = &link.lanes[usize::from(self.index)];
        let Phase::Up(reader, name, _) = &mut self.phase else {
            return Ok(());
        };
        if self.ack_backlog < ACK_BACKLOG_MAX {
            let lent = Lent {
                link,
                counters: &shared.counters.received,
                staging: &turn.worker.staging,
                scrap: turn.scrap,
            };
            reader.turn(&lent, TURN_BYTES)?;
        }
        if reader.acknowledged.is_empty() {
            return Ok(());
        }
        let mut helpers = 0u64;
        let mut sender = link.sender.lock();
        for (chunk, state) in reader.acknowledged.drain(..) {
            if state == ChunkState::Refused {
                add(&shared.counters.refused, 1);
            }
            sender.acknowledged(*name, chunk, state, turn.now);
            if self.referring {
                reader.settled_references.push(chunk);
            }
        }
        // What became free may be work for lanes that stopped looking.
        for other in &link.lanes {
            if other.index != self.index && other.idle.load(Ordering::Relaxed) && sender.has_work(other.index) {
                helpers |= 1 << other.index;
            }
        }
        drop(sender);
        for other in link.lanes.iter().filter(|other| helpers & (1 << other.index) != 0) {
            link.kick(other);
        }
        link.report();
        Ok(())
    }

    fn send(&mut self, turn: &Turn<'_>) -> Result<(), TcpError> {
        let link = &self.link;
        let shared = &link.lanes[usize::from(self.index)];
        let Phase::Up(reader, ..) = &mut self.phase else {
            return Ok(());
        };
        let reads = |reader: &Reader| reader.wants_turn();
        let writer = shared.writer.try_lock().or_else(|| {
            // A submitting thread is at it. It looks at this flag when it is done.
            shared.writer_wanted.store(true, Ordering::SeqCst);
            shared.writer.try_lock()
        });
        let Some(mut writer) = writer else {
            self.wants_turn = reads(reader);
            return Ok(());
        };
        if std::mem::take(&mut self.write_edge) {
            writer.writable = true;
        }
        if let Some(error) = writer.failed.take() {
            return Err(error);
        }
        writer.settle_references(&mut reader.settled_references);
        writer.declined(link, &mut reader.declined, turn.now)?;
        writer.validate(link, &mut reader.asked, &mut reader.acks)?;
        writer.acknowledge(&mut reader.acks);
        let sent = if writer.writable {
            writer.send(link, self.index, Filler::DataThread, turn.now)?
        } else {
            Sent::Blocked
        };
        writer.start_copies(link, turn.now);
        shared
            .idle
            .store(matches!(sent, Sent::Nothing | Sent::All), Ordering::Relaxed);
        self.writer_copying = writer.copying();
        self.writer_starved = writer.starved;
        self.referring = writer.has_referred();
        self.ack_backlog = writer.ack_backlog();
        let settled = std::mem::take(&mut writer.settled);
        let fenced = std::mem::take(&mut writer.gate_fenced);
        let memory_failed = std::mem::take(&mut writer.memory_failed);
        drop(writer);
        for (transfer, error) in memory_failed {
            link.emit(LinkEvent::MemoryFailed { transfer, error });
        }
        if fenced {
            link.emit(LinkEvent::SlotQuiet);
        }
        if settled {
            link.report();
        }
        self.wants_turn = sent == Sent::More || (reads(reader) && self.ack_backlog < ACK_BACKLOG_MAX);
        Ok(())
    }

    /// The peer has lost this lane: it must not carry anything any more, and the peer must hear what became of chunks.
    fn fence(&mut self, turn: &Turn<'_>, lane: LaneName, chunks: Vec<ChunkName>) {
        if lane.index == self.index {
            let mut mail = self.shared().mail.lock();
            mail.epoch_floor = mail.epoch_floor.max(lane.epoch);
            drop(mail);
            self.epoch = self.epoch.max(lane.epoch);
            if matches!(&self.adopted, Some((_, hello)) if hello.lane.epoch <= lane.epoch) {
                self.adopted = None;
            }
            match &self.phase {
                Phase::Up(_, name, _) if name.epoch <= lane.epoch => {
                    let place = self.link.place(*name);
                    self.lose(turn, TcpError::Fenced { place });
                }
                Phase::Dialing(dial) if dial.name.epoch <= lane.epoch => {
                    let place = self.link.place(dial.name);
                    self.dial_failed(turn, TcpError::Fenced { place });
                }
                _ => {}
            }
        }
        self.fences.push((lane, chunks));
    }

    /// Does what waits for the lane to be quiet: answers fences, takes a new connection, dials.
    fn settle(&mut self, turn: &Turn<'_>) {
        if matches!(self.phase, Phase::Draining(..)) {
            return;
        }
        for (lane, chunks) in std::mem::take(&mut self.fences) {
            let states = self.link.slots.chunk_states(self.link.peer.incarnation, &chunks);
            let chunks = chunks.into_iter().zip(states).collect();
            self.link.emit(LinkEvent::LaneFenced { lane, chunks });
        }
        if matches!(self.phase, Phase::Up(..)) {
            return;
        }
        if let Some((socket, hello)) = self.adopted.take() {
            return self.adopt(turn, socket, hello.lane);
        }
        if self.link.peer.dials && matches!(self.phase, Phase::Down { redial: None }) {
            self.dial(turn);
        }
    }

    fn adopt(&mut self, turn: &Turn<'_>, socket: OwnedFd, name: LaneName) {
        let up = connect::answer(&self.link, &socket, name).and_then(|()| self.watch(turn, &socket, name));
        match up {
            Ok(()) => self.up(turn, socket, name),
            Err(error) => tracing::debug!(%error, "a dialed lane was not taken"),
        }
    }

    fn dial(&mut self, turn: &Turn<'_>) {
        let link = self.link.clone();
        self.epoch = self.epoch.wrapping_add(1);
        let name = LaneName {
            index: self.index,
            epoch: self.epoch,
        };
        let Some(address) = link.peer.addresses.get(self.dials % link.peer.addresses.len().max(1)) else {
            // Nowhere to dial: the runtime gave no address. The peer may still dial us.
            self.phase = Phase::Down {
                redial: Some(Time::from_nanos(u64::MAX)),
            };
            return;
        };
        self.dials += 1;
        let dial = Dial::start(&link, name, address, turn.now)
            .and_then(|dial| self.watch(turn, dial.socket(), name).map(|()| dial));
        match dial {
            Ok(dial) => {
                self.timer = Some(dial.deadline);
                self.phase = Phase::Dialing(dial);
            }
            Err(error) => self.dial_failed(turn, error),
        }
    }

    fn dialed(&mut self, turn: &Turn<'_>) {
        if let Phase::Dialing(dial) = std::mem::replace(&mut self.phase, Phase::Down { redial: None }) {
            let name = dial.name;
            self.up(turn, dial.into_socket(), name);
        }
    }

    fn dial_failed(&mut self, turn: &Turn<'_>, error: TcpError) {
        tracing::debug!(%error, again_in = ?self.backoff, "a lane could not be dialed");
        self.redial(turn);
    }

    fn redial(&mut self, turn: &Turn<'_>) {
        let time = turn.now + self.backoff;
        self.backoff = (self.backoff * 2).min(self.link.config.backoff_max);
        self.timer = Some(time);
        self.phase = Phase::Down { redial: Some(time) };
    }

    fn watch(&self, turn: &Turn<'_>, socket: &OwnedFd, name: LaneName) -> Result<(), TcpError> {
        turn.worker
            .poller
            .add(socket, self.token as u64)
            .map_err(|source| TcpError::Call {
                call: "epoll_ctl",
                place: self.link.place(name),
                source,
            })
    }

    fn up(&mut self, turn: &Turn<'_>, socket: OwnedFd, name: LaneName) {
        let link = &self.link;
        let shared = &link.lanes[usize::from(self.index)];
        *shared.rail.lock() = Some(sys::endpoints(&socket));
        let socket = Arc::new(socket);
        shared
            .writer
            .lock()
            .open(socket.clone(), name, turn.worker.staging.clone());
        link.sender.lock().lane_up(name);
        self.phase = Phase::Up(Box::new(Reader::new(socket.clone(), name)), name, socket);
        self.backoff = link.config.backoff_min;
        self.write_edge = false;
        self.ack_backlog = 0;
        self.wants_turn = true;
        if link.lanes_up.fetch_add(1, Ordering::SeqCst) == 0 {
            link.emit(LinkEvent::Up);
        }
    }

    /// The connection is over, for whatever reason.
    fn lose(&mut self, turn: &Turn<'_>, error: TcpError) {
        let phase = std::mem::replace(&mut self.phase, Phase::Down { redial: None });
        let Phase::Up(mut reader, name, socket) = phase else {
            self.phase = phase;
            return;
        };
        tracing::debug!(%error, "a lane is lost");
        let shared = self.shared();
        // Waits for one non-blocking call of a submitting thread, at most.
        shared.writer.lock().shut();
        let _ = rustix::net::shutdown(&socket, Shutdown::Both);
        *shared.rail.lock() = None;
        *shared.loss.lock() = Some(error.to_string());
        add(&shared.counters.losses, 1);
        reader.shut(&self.link);
        self.link.exports.lane_lost();
        self.link.lanes_up.fetch_sub(1, Ordering::SeqCst);
        self.wants_turn = false;
        self.writer_copying = false;
        self.writer_starved = false;
        self.referring = false;
        self.phase = Phase::Draining(reader, name, error.into());
        self.drain(turn);
    }

    /// Once no copy of a lost connection runs any more: reports the loss and goes on.
    fn drain(&mut self, turn: &Turn<'_>) {
        let Phase::Draining(reader, name, error) = &mut self.phase else {
            return;
        };
        let link = &self.link;
        let shared = &link.lanes[usize::from(self.index)];
        let (name, error) = (*name, error.clone());
        let (writing, fenced) = {
            let mut writer = shared.writer.lock();
            (writer.drain_copies(), std::mem::take(&mut writer.gate_fenced))
        };
        if fenced {
            link.emit(LinkEvent::SlotQuiet);
        }
        if reader.drain_copies(link) || writing {
            return;
        }
        self.phase = Phase::Down { redial: None };
        let chunks = link.sender.lock().lane_lost(name);
        add(&shared.counters.in_doubt, chunks.len() as u64);
        if link.closed() {
            return self.end();
        }
        link.emit(LinkEvent::LaneLost {
            lane: name,
            chunks,
            error,
        });
        link.report();
        if link.peer.dials && self.adopted.is_none() {
            self.redial(turn);
        }
        self.settle(turn);
    }

    /// The link is closed: the lane ends as soon as no copy runs.
    fn close(&mut self, turn: &Turn<'_>) {
        self.adopted = None;
        match &self.phase {
            Phase::Up(_, _, _) => {
                let peer = self.link.peer.incarnation;
                self.lose(turn, TcpError::Closed { peer });
            }
            Phase::Draining(..) => {}
            Phase::Down { .. } | Phase::Dialing(_) => {
                self.phase = Phase::Down { redial: None };
                self.end();
            }
        }
    }

    fn end(&mut self) {
        self.shared().token.store(LANE_ENDED, Ordering::Relaxed);
        self.ended = true;
    }
}

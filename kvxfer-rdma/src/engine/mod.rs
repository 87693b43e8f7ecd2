//! Engines: one thread per device, which owns that device's queue pairs and does everything with them.

mod complete;
mod connect;
mod expose;
mod fill;
mod flush;
mod land;
mod lane;
mod lose;
mod receive;
mod staged;
mod work;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam::queue::SegQueue;
use kvxfer_core::flow::{ChunkName, LaneName};
use kvxfer_core::mutants;
use kvxfer_core::transport::LinkEvent;
use kvxfer_core::{Error, ErrorKind, Result, Time};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::clock;
use crate::config::RdmaConfig;
use crate::device::Device;
use crate::error::RdmaError;
use crate::link::LinkCore;
use crate::message::SlotUse;
use crate::staging::Staging;
use crate::transport::Shared;
use crate::verbs::{AsyncEventKind, CompletionBuffer, CompletionChannel, SendBatch};

use flush::Flusher;
use lane::Lane;
use work::Scratch;

/// Work requests that a queue pair has room for beyond its depth: markers of chunks given up midway.
pub(crate) const QUEUE_SLACK: u32 = 8;
/// Completions taken from a queue at once.
const COMPLETIONS_MAX: usize = 64;

/// The part of an engine that others reach.
pub(crate) struct EngineShared {
    pub(crate) device: Device,
    pub(crate) staging: Staging,
    // Bounded by the number of rails and links: a rail is in it at most once (`Rail::kicked`).
    tasks: SegQueue<Task>,
    wake: OwnedFd,
    // Whether the thread sleeps or is about to: only then is a wake-up worth a system call.
    asleep: AtomicBool,
    stopping: AtomicBool,
    // The thread has ended: tasks would only keep their links alive.
    gone: AtomicBool,
}

/// What an engine is asked to do.
pub(crate) enum Task {
    /// Look at a rail.
    Rail(Arc<LinkCore>, u16),
    /// Report what the sender has to say.
    Report(Arc<LinkCore>),
    /// Answer the fence of a lane that was never here.
    AnswerFence(Arc<LinkCore>, LaneName, Vec<ChunkName>),
    /// Watch the link's revocations, and whether it comes up.
    Watch(Arc<LinkCore>),
    /// End a link that had no rail.
    EndLink(Arc<LinkCore>),
    /// Look at a slot's memory, then let the peer write into it; the peer may have asked.
    Admit(Arc<LinkCore>, SlotUse, bool),
}

impl EngineShared {
    pub(crate) fn new(device: Device, config: &RdmaConfig) -> Result<Arc<EngineShared>> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| {
            Error::new(ErrorKind::ResourceExhausted, "eventfd failed")
                .at("rdma")
                .because(error.to_string())
                .remedy("raise the limit of open files (`ulimit -n`)")
        })?;
        Ok(Arc::new(EngineShared {
            staging: Staging::new(&device.domain, config.staging_bytes_max),
            device,
            tasks: SegQueue::new(),
            wake,
            asleep: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            gone: AtomicBool::new(false),
        }))
    }

    pub(crate) fn push(&self, task: Task) {
        self.tasks.push(task);
        // Either this sees that the thread is gone, or the thread's last look sees the task.
        if self.gone.load(Ordering::SeqCst) {
            while self.tasks.pop().is_some() {}
        }
        self.wake();
    }

    /// Has the thread end.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            // The counter cannot be full: whoever sleeps empties it first.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

/// What an engine lends to the lane whose turn it is.
struct Turn<'a> {
    device: &'a Device,
    channel: &'a CompletionChannel,
    flusher: &'a mut Flusher,
    batch: &'a mut SendBatch,
    scratch: &'a mut Scratch,
    staging: &'a Staging,
    now: Time,
}

/// A device's thread.
pub(crate) struct Engine {
    shared: Arc<EngineShared>,
    transport: Arc<Shared>,
    channel: CompletionChannel,
    flusher: Flusher,
    lanes: HashMap<(u64, u16), Lane>,
    // Links whose revocations or set-up this engine looks after.
    watched: Vec<Arc<LinkCore>>,
    // Links that were touched in this turn: their messages and events are sent at its end.
    touched: Vec<Arc<LinkCore>>,
    completions: CompletionBuffer,
    batch: SendBatch,
    scratch: Scratch,
    // The time of this round.
    now: Time,
    // The device is gone for good.
    dead: Option<Error>,
}

impl Engine {
    /// Opens what the engine needs of its device.
    ///
    /// # Errors
    /// What the device refuses.
    pub(crate) fn new(shared: Arc<EngineShared>, transport: Arc<Shared>) -> Result<Engine> {
        let channel = CompletionChannel::new(&shared.device.context).map_err(RdmaError::from)?;
        let flusher = Flusher::new(&shared.device, &channel, transport.config.fence_limit)?;
        let depth = transport.config.queue_depth;
        let segments = shared.device.send_segments.max(shared.device.read_segments);
        Ok(Engine {
            channel,
            flusher,
            lanes: HashMap::new(),
            watched: Vec::new(),
            touched: Vec::new(),
            completions: CompletionBuffer::new(COMPLETIONS_MAX),
            batch: SendBatch::new((depth + QUEUE_SLACK) as usize, (depth * segments.min(8)) as usize),
            scratch: Scratch::new(segments as usize),
            now: clock::now(),
            dead: None,
            shared,
            transport,
        })
    }

    /// The thread's life. `mutant` is the seeded defect that was on where the transport was made.
    pub(crate) fn run(mut self, #[allow(unused)] mutant: Option<mutants::Mutant>) {
        #[cfg(feature = "mutants")]
        mutants::set(mutant);
        while !self.shared.stopping.load(Ordering::SeqCst) {
            // Once per round: there are machines where asking is a system call.
            self.now = clock::now();
            let mut busy = self.take_tasks();
            busy |= self.poll_lanes();
            busy |= self.take_turns();
            if !busy {
                self.wait();
            }
        }
        self.end();
    }

    fn take_tasks(&mut self) -> bool {
        let mut any = false;
        // Those that are there now: new ones come in the next turn.
        for _ in 0..self.shared.tasks.len() {
            let Some(task) = self.shared.tasks.pop() else { break };
            any = true;
            match task {
                Task::Rail(link, rail) => self.look_at(link, rail),
                Task::Report(link) => link.report(),
                Task::AnswerFence(link, lane, chunks) => {
                    let states = link.slots.chunk_states(link.peer.incarnation, &chunks);
                    link.emit(LinkEvent::LaneFenced {
                        lane,
                        chunks: chunks.into_iter().zip(states).collect(),
                    });
                }
                Task::Watch(link) => {
                    if !self.watched.iter().any(|other| other.id == link.id) {
                        self.watched.push(link);
                    }
                }
                Task::EndLink(link) => link.end_alone(),
                Task::Admit(link, slot, asked) => {
                    link.verify_and_admit(slot, asked);
                    link.flush();
                }
            }
        }
        any
    }

    /// Takes a rail's mail, and makes the rail's lane if it is new here.
    fn look_at(&mut self, link: Arc<LinkCore>, rail: u16) {
        let shared = &link.rails[usize::from(rail)];
        shared.kicked.store(false, Ordering::SeqCst);
        let key = (link.id, rail);
        let lane = match self.lanes.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let Some(place) = shared.place.get().copied().filter(|_| !link.detached(rail)) else {
                    return;
                };
                entry.insert(Lane::new(link.clone(), rail, place))
            }
        };
        lane.kicked = true;
    }

    /// Handles what has completed.
    fn poll_lanes(&mut self) -> bool {
        let mut any = false;
        let now = self.now;
        for lane in self.lanes.values_mut() {
            any |= lane.poll(&mut self.completions, now);
        }
        any | self.flusher.poll(&mut self.completions)
    }

    /// Gives each lane that has something to do its turn.
    fn take_turns(&mut self) -> bool {
        let mut any = false;
        let now = self.now;
        let mut turn = Turn {
            staging: &self.shared.staging,
            device: &self.shared.device,
            channel: &self.channel,
            flusher: &mut self.flusher,
            batch: &mut self.batch,
            scratch: &mut self.scratch,
            now,
        };
        for lane in self.lanes.values_mut() {
            if let Some(error) = &self.dead {
                lane.device_gone(error);
            }
            if lane.wants_turn(now) {
                any = true;
                lane.turn(&mut turn);
                if !self.touched.iter().any(|link| link.id == lane.link.id) {
                    self.touched.push(lane.link.clone());
                }
            }
        }
        let flushed = (&self.transport.registry, &self.shared.staging);
        self.flusher.advance(&self.shared.device, &self.channel, flushed, now);
        for asker in self.flusher.answered() {
            match self.lanes.get_mut(&asker) {
                Some(lane) => lane.kicked = true,
                None => self.flusher.withdraw(asker),
            }
            any = true;
        }
        for taker in self.shared.staging.served_next() {
            match self.lanes.get_mut(&taker) {
                Some(lane) => lane.kicked = true,
                None => self.shared.staging.withdraw(taker),
            }
            any = true;
        }
        for link in self.touched.drain(..) {
            link.confirm_revocations();
            link.flush();
            link.report();
        }
        self.lanes.retain(|_, lane| {
            if lane.ended() {
                lane.quarantine();
                lane.link.detach(lane.rail);
            }
            !lane.ended()
        });
        self.watched.retain(|link| {
            link.check_rails(now);
            let more = link.check_revocations(now).is_some() || !link.settled();
            link.flush();
            more && !link.closing()
        });
        any
    }

    /// Sleeps until something happens or is due.
    fn wait(&mut self) {
        let spin = self.transport.config.spin;
        if !spin.is_zero() && self.spin(spin) {
            return;
        }
        // Each queue is armed and then looked at once more: what came before the arming makes no event.
        let mut armed = false;
        for lane in self.lanes.values_mut() {
            armed |= lane.arm();
        }
        armed |= self.flusher.arm();
        if armed && self.poll_lanes() || self.lanes.values().any(|lane| lane.kicked) {
            return;
        }
        let timeout = self.timeout();
        self.shared.asleep.store(true, Ordering::SeqCst);
        // Whoever pushes after this look sees that we sleep.
        if self.shared.tasks.is_empty() && !self.shared.stopping.load(Ordering::SeqCst) {
            self.sleep(timeout);
        }
        self.shared.asleep.store(false, Ordering::SeqCst);
    }

    /// Polls for a while. True if something happened.
    fn spin(&mut self, spin: Duration) -> bool {
        let end = clock::now() + spin;
        loop {
            self.now = clock::now();
            if self.poll_lanes() || !self.shared.tasks.is_empty() || self.shared.stopping.load(Ordering::SeqCst) {
                return true;
            }
            if self.now >= end {
                return false;
            }
            std::hint::spin_loop();
        }
    }

    fn sleep(&mut self, timeout: Option<Duration>) {
        let timespec = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        });
        let device = &self.shared.device;
        let asynchronous = device.context.async_fd();
        let ready = {
            let mut fds = [
                PollFd::from_borrowed_fd(self.shared.wake.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.channel.fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(asynchronous, PollFlags::IN),
            ];
            match poll(&mut fds, timespec.as_ref()) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => return,
                Err(error) => {
                    // Nothing that live descriptors of ours can say; do not turn it into a busy loop.
                    tracing::error!(%error, "poll failed");
                    std::thread::sleep(Duration::from_millis(1));
                    return;
                }
            }
            fds.map(|fd| !fd.revents().is_empty())
        };
        if ready[0] {
            let _ = rustix::io::read(&self.shared.wake, &mut [0u8; 8]);
        }
        if ready[1] {
            match self.channel.drain() {
                Ok(_) => {}
                Err(error) => tracing::error!(%error, "completion events"),
            }
            for lane in self.lanes.values_mut() {
                lane.disarmed();
            }
            self.flusher.disarmed();
        }
        if ready[2] {
            self.take_events();
        }
    }

    /// When to look again whatever happens.
    fn timeout(&self) -> Option<Duration> {
        let now = self.now;
        let mut next: Option<Time> = self.flusher.due();
        let mut sooner = |time: Time| next = Some(next.map_or(time, |next| next.min(time)));
        for lane in self.lanes.values() {
            lane.due(now).into_iter().for_each(&mut sooner);
        }
        for link in &self.watched {
            sooner(link.next_look(now));
        }
        next.map(|time| time.since(now))
    }

    /// Port, device and queue pair events.
    fn take_events(&mut self) {
        loop {
            match self.shared.device.context.next_async_event() {
                Ok(Some(event)) => self.event(event.kind),
                Ok(None) => return,
                Err(error) => {
                    tracing::error!(%error, "asynchronous events");
                    return;
                }
            }
        }
    }

    fn event(&mut self, event: AsyncEventKind) {
        let device = &self.shared.device;
        tracing::info!(device = device.name, ?event, "device event");
        let lost = |why: &str| {
            Error::from(RdmaError::Lost {
                place: format!("device {}", device.name),
                why: why.to_owned(),
            })
        };
        match event {
            AsyncEventKind::QpFatal(number) => {
                for lane in self.lanes.values_mut().filter(|lane| lane.queue_pair() == Some(number)) {
                    lane.fail(lost("the device reports a fatal error of the queue pair"));
                }
            }
            AsyncEventKind::PortDown(port) => {
                // So that no rail is tried over it before it is back.
                device.refresh(port);
                for lane in self.lanes.values_mut().filter(|lane| lane.port(device) == Some(port)) {
                    lane.fail(lost(&format!("port {port} went down")));
                }
            }
            AsyncEventKind::PortActive(port) => {
                device.refresh(port);
                for lane in self.lanes.values_mut().filter(|lane| lane.port(device) == Some(port)) {
                    lane.try_now();
                }
            }
            AsyncEventKind::GidChange(port) | AsyncEventKind::LidChange(port) | AsyncEventKind::PkeyChange(port) => {
                if device.refresh(port) {
                    for lane in self.lanes.values_mut().filter(|lane| lane.port(device) == Some(port)) {
                        lane.fail(lost(&format!("the addresses of port {port} changed")));
                    }
                }
            }
            AsyncEventKind::DeviceFatal => {
                self.dead = Some(lost("the device reports a fatal error"));
            }
            AsyncEventKind::CqError => {
                for lane in self.lanes.values_mut() {
                    lane.fail(lost("the device reports a completion queue error"));
                }
            }
            AsyncEventKind::Other(_) => {}
        }
    }

    /// Ends what can be ended in time: queue pairs are destroyed, whatever was on them.
    fn end(mut self) {
        for (_, mut lane) in self.lanes.drain() {
            lane.destroy();
        }
        self.shared.gone.store(true, Ordering::SeqCst);
        while self.shared.tasks.pop().is_some() {}
    }
}

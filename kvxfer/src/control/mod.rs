//! Driving the control plane: the machine under one lock, what it wants done, and the thread that waits for it.
//!
//! Application threads and the control thread call [`Shared::call`]: it takes the lock, lets the machine decide,
//! carries out what it wants in order, and releases the lock before anything runs that could take time or call back
//! (sockets, wakers, events). Data threads only leave [`reports`].

mod carry_out;
mod connection;
mod dial;
mod listen;
mod reports;
mod timer;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::TcpStream;
use tokio::runtime::Handle as RuntimeHandle;
use tokio::sync::watch;

use kvxfer_core::machine::{ConnectionId, HandleId, Machine, PeerChange};
use kvxfer_core::transport::{Link, LinkEvent, Path};
use kvxfer_core::wire::{EndpointAddress, Frame};
use kvxfer_core::{Error, ErrorKind, Incarnation, PoolId, Result, Time};

use crate::clock;
use crate::config::Config;
use crate::events::EventQueue;
use crate::handle::Entry;
use crate::metrics::Metrics;
use crate::transports::{PoolRegistration, Transports};

use carry_out::After;
pub(crate) use connection::Connection;
pub(crate) use listen::{Listeners, bind, preference};
use reports::Report;
pub(crate) use reports::{Reports, seen_to};
use timer::Timer;

/// Reports handled with the lock held once; more wait a turn, so that application threads get in between.
const REPORTS_PER_TURN: usize = 256;
/// How long work that was begun may wait for a turn while nobody looks. Large transfers take milliseconds.
const DEFER: Duration = Duration::from_micros(50);
/// Accepted connections are numbered from here on; dialed ones are numbered by the machine, from `1 << 63` on.
const ACCEPTED_FROM: u64 = 1;

/// What an endpoint, its pools and its handles share.
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    pub(crate) address: EndpointAddress,
    pub(crate) config: Config,
    pub(crate) transports: Transports,
    /// Loaded when it is first needed.
    pub(crate) cuda: Mutex<Option<kvxfer_cuda::Cuda>>,
    pub(crate) events: Arc<EventQueue>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) reports: Arc<Reports>,
    /// What builds on the machine; see [`Shared::call`].
    state: Mutex<State>,
    /// Told when handles end, peers come or go, and at quiet: with the lock of `state`.
    progress: Condvar,
    timer: Timer,
    runtime: RuntimeHandle,
    /// True from the moment that everything of the control plane has to end.
    stop: watch::Sender<bool>,
    /// Session connections that are served, those included that are on their way out.
    served: AtomicUsize,
}

/// The machine, and what its numbers stand for.
pub(crate) struct State {
    pub(crate) machine: Machine,
    pub(crate) handles: HashMap<HandleId, Entry>,
    pub(crate) peers: HashMap<Incarnation, Peer>,
    connections: HashMap<ConnectionId, Arc<Connection>>,
    links: HashMap<Incarnation, LinkEntry>,
    /// Pools whose last handle is gone while the machine still needs them.
    pub(crate) orphans: Vec<(PoolId, PoolRegistration)>,
    next_pool: u32,
    next_accepted: u64,
    next_link: u64,
    /// When the timer is set to fire.
    armed: Option<Time>,
    /// Something happened that somebody may wait for in [`Shared::wait_for`].
    progress: bool,
    pub(crate) phase: Phase,
}

/// How far the endpoint is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Open,
    Draining,
    Closed,
}

struct LinkEntry {
    number: u64,
    link: Arc<dyn Link>,
    up: bool,
    closing: bool,
}

/// What is known of a peer, for people.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    pub(crate) name: String,
    pub(crate) address: Option<EndpointAddress>,
    pub(crate) state: PeerState,
    pub(crate) transport: Option<String>,
    pub(crate) refused: Vec<(String, String)>,
    pub(crate) since: Time,
}

/// How a session stands.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerState {
    /// The session is up.
    Ready,
    /// The connection broke and is being made anew.
    Interrupted {
        /// Why.
        why: String,
    },
    /// The peer takes no new work.
    Draining,
    /// Lost: every handle with it has ended.
    Lost(Error),
}

/// What a [`Shared`] is made of.
pub(crate) struct Parts {
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    pub(crate) address: EndpointAddress,
    pub(crate) config: Config,
    pub(crate) transports: Transports,
    pub(crate) machine: Machine,
    pub(crate) runtime: RuntimeHandle,
}

impl Shared {
    pub(crate) fn new(parts: Parts) -> Result<Arc<Shared>> {
        let timer = Timer::new()?;
        Ok(Arc::new(Shared {
            name: parts.name,
            incarnation: parts.incarnation,
            address: parts.address,
            config: parts.config,
            transports: parts.transports,
            cuda: Mutex::new(None),
            events: EventQueue::new()?,
            metrics: Arc::new(Metrics::new()),
            reports: Reports::new(timer.clone()),
            state: Mutex::new(State {
                machine: parts.machine,
                handles: HashMap::new(),
                peers: HashMap::new(),
                connections: HashMap::new(),
                links: HashMap::new(),
                orphans: Vec::new(),
                next_pool: 0,
                next_accepted: ACCEPTED_FROM,
                next_link: 0,
                armed: None,
                progress: false,
                phase: Phase::Open,
            }),
            progress: Condvar::new(),
            timer,
            runtime: parts.runtime,
            stop: watch::Sender::new(false),
            served: AtomicUsize::new(0),
        }))
    }

    /// Lets the machine decide something, and carries out what follows.
    pub(crate) fn call<R>(self: &Arc<Self>, decide: impl FnOnce(&mut State, Time) -> R) -> R {
        let mut after = After::default();
        let mut state = self.state.lock();
        let result = decide(&mut state, clock::now());
        self.carry_out(&mut state, &mut after);
        drop(state);
        self.finish(after);
        result
    }

    /// As [`call`](Self::call), for what starts new work.
    pub(crate) fn begin<R>(self: &Arc<Self>, decide: impl FnOnce(&mut State, Time) -> Result<R>) -> Result<R> {
        self.call(|state, now| {
            self.takes_work(state)?;
            decide(state, now)
        })
    }

    /// As [`begin`](Self::begin), with what follows left to the control thread: planning, and waking data threads, cost
    /// a caller more than deciding does, and large work does not mind the hop.
    ///
    /// Not even the control thread is woken from here if all can wait for a moment: the system call and the switch of
    /// threads that follows it, where processors are few, would cost the caller more than the rest. It wakes by itself
    /// after [`DEFER`]; or at once when somebody begins to look at or wait for a transfer, who gives up the processor anyway.
    pub(crate) fn begin_heavy<R>(self: &Arc<Self>, decide: impl FnOnce(&mut State, Time) -> Result<R>) -> Result<R> {
        let mut state = self.state.lock();
        self.takes_work(&state)?;
        let now = clock::now();
        let result = decide(&mut state, now);
        if state.machine.has_actions() {
            drop(state);
            self.reports.ring();
        } else if state.machine.next_timer().is_some_and(|at| at <= now) && self.reports.defer() {
            // What is due waits for the turn that this sets the timer for: nobody needs to set it for `now` meanwhile.
            let armed = state.armed.unwrap_or(now + DEFER);
            self.timer.set(armed.min(now + DEFER));
            state.armed = Some(armed.min(now));
            drop(state);
        }
        result
    }

    fn takes_work(&self, state: &State) -> Result<()> {
        match state.phase {
            Phase::Open => Ok(()),
            Phase::Draining => Err(Error::new(ErrorKind::Closed, "new work")
                .at(format!("endpoint {}", self.name))
                .because("the endpoint drains")
                .remedy("send it to another endpoint")),
            Phase::Closed => Err(closed(&self.name)),
        }
    }

    /// Looks at the state without deciding anything.
    pub(crate) fn look<R>(&self, look: impl FnOnce(&State) -> R) -> R {
        look(&self.state.lock())
    }

    /// Waits until `done` says so, told by progress and asked again at least every `period`; false if it did not in
    /// time.
    pub(crate) fn wait_for(&self, timeout: Duration, mut done: impl FnMut(&State) -> bool) -> bool {
        let deadline = Instant::now() + timeout.min(Duration::from_secs(365 * 86_400));
        let mut state = self.state.lock();
        loop {
            if done(&state) {
                return true;
            }
            let now = Instant::now();
            if now >= deadline {
                return false;
            }
            // What is asked for may come true without anything ending (a verdict's retention, say).
            let _ = self
                .progress
                .wait_until(&mut state, deadline.min(now + Duration::from_millis(20)));
        }
    }

    /// Frames that came on a connection.
    fn frames(self: &Arc<Self>, connection: ConnectionId, frames: Vec<Frame>) {
        self.call(|state, now| {
            // A connection that was told to close has nothing to say any more.
            if state.connections.contains_key(&connection) {
                for frame in frames {
                    state.machine.frame(now, connection, frame);
                }
            }
        });
    }

    fn connection_ended(self: &Arc<Self>, connection: ConnectionId, why: Error) {
        self.call(|state, now| {
            if state.connections.remove(&connection).is_some() {
                state.machine.disconnected(now, connection, why);
            }
        });
    }

    fn accepted(self: &Arc<Self>, stream: TcpStream, from: SocketAddr) -> Arc<Connection> {
        self.call(|state, now| {
            let id = ConnectionId(state.next_accepted);
            state.next_accepted += 1;
            let connection = Connection::new(id, stream, from);
            state.connections.insert(id, Arc::clone(&connection));
            state.machine.accepted(now, id, from);
            connection
        })
    }

    fn dialed(self: &Arc<Self>, id: ConnectionId, stream: TcpStream, to: SocketAddr) -> Arc<Connection> {
        self.call(|state, now| {
            let connection = Connection::new(id, stream, to);
            state.connections.insert(id, Arc::clone(&connection));
            state.machine.dialed(now, id);
            connection
        })
    }

    /// What has been reported and what is due. Any thread may take a turn; the control thread does when woken.
    /// Whether more is waiting.
    pub(crate) fn turn(self: &Arc<Self>, fired: bool) -> bool {
        let deferred = self.reports.look();
        self.call(|state, now| {
            // What was deferred is seen to now: the timer is set for what is next after it.
            if fired || deferred {
                state.armed = None;
            }
            for _ in 0..REPORTS_PER_TURN {
                let Some(report) = self.reports.pop() else { break };
                state.reported(now, report);
            }
            for _ in 0..REPORTS_PER_TURN {
                let Some((event, result)) = self.reports.pop_happened() else {
                    break;
                };
                state.machine.event_happened(now, event, &result);
            }
            if state.machine.next_timer().is_some_and(|at| at <= now) {
                state.machine.timer(now);
            }
        });
        !self.reports.is_empty()
    }

    /// The control thread's life.
    pub(crate) async fn control(self: Arc<Self>, listeners: Listeners) {
        let mut stop = self.stop.subscribe();
        for listener in listeners.into_tokio() {
            match listener {
                Ok(listener) => self.spawn(listen::accept(Arc::clone(&self), listener)),
                Err(error) => tracing::error!(%error, "a listener could not be served"),
            }
        }
        // SAFETY: the descriptor stays open for as long as any clone of the timer lives, and the registration owns one.
        let timer = match unsafe { AsyncFd::register_with_interest(self.timer.clone(), Interest::READABLE) } {
            Ok(timer) => timer,
            Err(error) => {
                tracing::error!(%error, "the control plane has no timer and ends");
                return;
            }
        };
        let mut fired = false;
        loop {
            self.metrics.control_wakeups.add(1);
            while self.turn(std::mem::take(&mut fired)) {
                tokio::task::yield_now().await;
            }
            tokio::select! {
                () = self.reports.woken() => {}
                ready = timer.readable() => {
                    if let Ok(mut ready) = ready {
                        self.timer.clear();
                        ready.clear_ready();
                    }
                    fired = true;
                }
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
    }

    /// Runs a task of the control plane until it ends or the endpoint stops.
    fn spawn(self: &Arc<Self>, task: impl Future<Output = ()> + Send + 'static) {
        let mut stop = self.stop.subscribe();
        self.runtime.spawn(async move {
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => {}
                () = task => {}
            }
        });
    }

    /// Waits until the peers have taken what was said to them last, or have had the time to.
    pub(crate) fn linger(&self) {
        let began = std::time::Instant::now();
        while self.served.load(Ordering::Acquire) > 0 && began.elapsed() < 2 * connection::LINGER {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Ends the control thread's tasks and the listener.
    pub(crate) fn stop(&self) {
        self.stop.send_replace(true);
    }

    pub(crate) fn next_pool(&self, state: &mut State) -> PoolId {
        let id = PoolId(state.next_pool);
        state.next_pool += 1;
        id
    }

    /// The path to a peer, if there is a link.
    pub(crate) fn path(&self, peer: Incarnation) -> Option<Path> {
        let link = self.look(|state| state.links.get(&peer).map(|entry| Arc::clone(&entry.link)));
        link.map(|link| link.path())
    }

    /// Whether transfers to the peer can run now.
    pub(crate) fn link_is_up(state: &State, peer: Incarnation) -> bool {
        state.links.get(&peer).is_some_and(|entry| entry.up && !entry.closing)
    }

    /// Ends every handle that is still open: the last thing an endpoint does.
    /// How many there were.
    pub(crate) fn end_all(self: &Arc<Self>, error: &Error) -> usize {
        let mut after = After::default();
        let mut state = self.state.lock();
        let handles: Vec<(HandleId, Entry)> = state.handles.drain().collect();
        let count = handles.len();
        for (id, entry) in handles {
            after.ended(self, id, entry, Err(error.clone()), clock::now());
        }
        state.connections.clear();
        drop(state);
        self.finish(after);
        count
    }

    /// Waits for progress, at most for `timeout`.
    pub(crate) fn pause(&self, timeout: Duration) {
        let mut state = self.state.lock();
        let _ = self.progress.wait_for(&mut state, timeout);
    }
}

impl State {
    fn reported(&mut self, now: Time, report: Report) {
        match self.links.get_mut(&report.peer) {
            // The peer's present link, or one that is being closed.
            Some(entry) if entry.number == report.link => {
                match &report.event {
                    LinkEvent::Up => {
                        entry.up = true;
                        self.progress = true;
                    }
                    LinkEvent::Failed(error) => {
                        tracing::warn!(peer = %report.peer, transport = entry.link.path().transport, %error, "link failed");
                        // It closes itself; nothing runs on it any more.
                        entry.up = false;
                        entry.closing = true;
                        self.progress = true;
                    }
                    LinkEvent::Closed => {
                        self.links.remove(&report.peer);
                        self.progress = true;
                    }
                    _ => {}
                }
                self.machine.link_event(now, report.peer, report.event);
            }
            // An earlier link's last words: slots outlive links, everything else is settled.
            _ => {
                if matches!(report.event, LinkEvent::SlotQuiet | LinkEvent::SlotArrived { .. }) {
                    self.machine.link_event(now, report.peer, report.event);
                }
            }
        }
    }

    fn peer_changed(&mut self, now: Time, peer: Incarnation, change: &PeerChange) {
        let known = self.peers.entry(peer).or_insert_with(|| Peer {
            name: String::new(),
            address: None,
            state: PeerState::Interrupted {
                why: "connecting".into(),
            },
            transport: None,
            refused: Vec::new(),
            since: now,
        });
        match change {
            PeerChange::Ready {
                name, address, resumed, ..
            } => {
                tracing::info!(%peer, name, resumed, "session ready");
                known.name.clone_from(name);
                known.address = Some(address.clone());
                known.state = PeerState::Ready;
                known.since = now;
            }
            PeerChange::Interrupted { why } => {
                tracing::info!(%peer, why, "session interrupted");
                known.state = PeerState::Interrupted { why: why.clone() };
                known.since = now;
            }
            PeerChange::Draining => {
                tracing::info!(%peer, "peer drains");
                known.state = PeerState::Draining;
                known.since = now;
            }
            PeerChange::Path { transport, refused } => {
                tracing::info!(%peer, ?transport, ?refused, "path chosen");
                known.transport.clone_from(transport);
                known.refused.clone_from(refused);
            }
            PeerChange::Lost(error) => {
                tracing::warn!(%peer, %error, "peer lost");
                // Remembered for `explain` until it returns.
                known.state = PeerState::Lost(error.clone());
                known.since = now;
                self.forget_old_peers();
            }
        }
    }

    /// Lost peers are kept for people only, and only so many.
    fn forget_old_peers(&mut self) {
        const LOST_KEPT: usize = 64;
        let mut lost: Vec<(Time, Incarnation)> = self
            .peers
            .iter()
            .filter(|(_, peer)| matches!(peer.state, PeerState::Lost(_)))
            .map(|(peer, known)| (known.since, *peer))
            .collect();
        if lost.len() > LOST_KEPT {
            lost.sort_unstable();
            for (_, peer) in &lost[..lost.len() - LOST_KEPT] {
                self.peers.remove(peer);
            }
        }
    }
}

/// The error of every call on a closed endpoint.
pub(crate) fn closed(name: &str) -> Error {
    Error::new(ErrorKind::Closed, "the endpoint is closed")
        .at(format!("endpoint {name}"))
        .remedy("build a new one")
}

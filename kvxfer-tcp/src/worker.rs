//! Data threads: each owns some lanes, waits for them in epoll, and gives them turns.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam::queue::SegQueue;
use kvxfer_core::Time;
use rustix::event::epoll;

use crate::config::TcpConfig;
use crate::lane::Lane;
use crate::link::LinkCore;
use crate::receive::SCRAP_BYTES;
use crate::staging::StagingPool;
use crate::sys::{self, Poller, Ready, WAKE};
use crate::transport::Shared;

/// Events taken from epoll at once.
const EVENTS_MAX: usize = 128;
/// Copies are polled after these pauses: at once a few times, then with growing pauses, so that a long copy costs little.
const COPY_POLLS_AT_ONCE: u32 = 16;
const COPY_PAUSE_MIN: Duration = Duration::from_micros(10);
const COPY_PAUSE_MAX: Duration = Duration::from_micros(500);
/// Copies that may wait for others do so no longer than this.
const COPY_PATIENCE: Duration = Duration::from_micros(500);

/// The part of a data thread that others reach.
pub(crate) struct WorkerShared {
    pub(crate) poller: Poller,
    // Bounded by the number of lanes: a lane is in it at most once (`LaneShared::kicked`).
    kicks: SegQueue<(Arc<LinkCore>, u16)>,
    // Whether the thread sleeps or is about to: only then is a wake-up worth a system call.
    asleep: AtomicBool,
    stopping: AtomicBool,
    // The thread has ended: kicks would only keep their links alive.
    gone: AtomicBool,
    pub(crate) staging: Arc<StagingPool>,
}

impl WorkerShared {
    pub(crate) fn new(config: &TcpConfig) -> std::io::Result<Arc<WorkerShared>> {
        Ok(Arc::new(WorkerShared {
            poller: Poller::new()?,
            kicks: SegQueue::new(),
            asleep: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            staging: StagingPool::new(config.staging_buffers_max),
        }))
    }

    /// Has the thread look at a lane.
    pub(crate) fn push(&self, link: Arc<LinkCore>, lane: u16) {
        self.kicks.push((link, lane));
        // Either this sees that the thread is gone, or the thread's last look sees the kick.
        if self.gone.load(Ordering::SeqCst) {
            self.clear();
        }
        self.wake();
    }

    fn clear(&self) {
        while self.kicks.pop().is_some() {}
    }

    /// Has the thread end.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.wake();
    }

    pub(crate) fn wake(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.poller.wake();
        }
    }
}

/// What a data thread lends to the lane whose turn it is.
pub(crate) struct Turn<'a> {
    pub(crate) worker: &'a WorkerShared,
    pub(crate) scrap: *mut u8,
    pub(crate) now: Time,
}

/// A data thread.
pub(crate) struct Worker {
    shared: Arc<WorkerShared>,
    transport: Arc<Shared>,
    /// Looks after connections that wait for their link.
    first: bool,
    lanes: Vec<Option<Box<Lane>>>,
    free: Vec<usize>,
    /// Lanes that may have something to do, in the order in which they get their turns.
    runnable: VecDeque<usize>,
    /// When lanes want to be looked at whatever happens.
    timers: BinaryHeap<Reverse<(Time, usize)>>,
    /// Lanes with copies under way or waiting for staging buffers.
    copying: Vec<usize>,
    copy_polls: u32,
    copies_polled: Time,
    scrap: Box<[u8]>,
    events: Vec<epoll::Event>,
}

impl Worker {
    pub(crate) fn new(shared: Arc<WorkerShared>, transport: Arc<Shared>, first: bool) -> Worker {
        Worker {
            shared,
            transport,
            first,
            lanes: Vec::new(),
            free: Vec::new(),
            runnable: VecDeque::new(),
            timers: BinaryHeap::new(),
            copying: Vec::new(),
            copy_polls: 0,
            copies_polled: sys::now(),
            scrap: vec![0; SCRAP_BYTES].into_boxed_slice(),
            events: Vec::with_capacity(EVENTS_MAX),
        }
    }

    /// The thread's life.
    pub(crate) fn run(mut self) {
        while !self.shared.stopping.load(Ordering::SeqCst) {
            self.wait(None);
            self.take_events();
            self.take_kicks();
            self.take_timers();
            self.poll_copies();
            self.give_turns();
        }
        self.end();
        self.shared.gone.store(true, Ordering::SeqCst);
        self.shared.clear();
    }

    /// Waits until there is something to do.
    fn wait(&mut self, limit: Option<Duration>) {
        if !self.runnable.is_empty() {
            return self.poll(Some(Duration::ZERO));
        }
        let spin = self.transport.config.spin;
        if !spin.is_zero() && self.spin(spin) {
            return;
        }
        let timeout = self.timeout(limit);
        if timeout == Some(Duration::ZERO) {
            return self.poll(timeout);
        }
        self.shared.asleep.store(true, Ordering::SeqCst);
        // Whoever pushes after this look sees that we sleep.
        if self.shared.kicks.is_empty() && !self.shared.stopping.load(Ordering::SeqCst) {
            self.poll(timeout);
        }
        self.shared.asleep.store(false, Ordering::SeqCst);
    }

    /// Polls for a while. True if something happened.
    fn spin(&mut self, spin: Duration) -> bool {
        let end = sys::now() + spin;
        loop {
            self.poll(Some(Duration::ZERO));
            if !self.events.is_empty()
                || !self.shared.kicks.is_empty()
                || self.shared.stopping.load(Ordering::SeqCst)
                || !self.copying.is_empty()
            {
                return true;
            }
            if sys::now() >= end {
                return false;
            }
            std::hint::spin_loop();
        }
    }

    fn poll(&mut self, timeout: Option<Duration>) {
        if let Err(error) = self.shared.poller.wait(&mut self.events, timeout) {
            // Nothing that a live epoll instance of ours can say; do not turn it into a busy loop.
            tracing::error!(%error, "epoll_wait failed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn timeout(&mut self, limit: Option<Duration>) -> Option<Duration> {
        let mut timeout = limit;
        let mut shorten = |other: Duration| timeout = Some(timeout.map_or(other, |timeout| timeout.min(other)));
        if let Some(patience) = self.copy_patience() {
            shorten(patience);
        } else if !self.copying.is_empty() {
            shorten(match self.copy_polls.checked_sub(COPY_POLLS_AT_ONCE) {
                None => Duration::ZERO,
                Some(polls) => (COPY_PAUSE_MIN * (1 << polls.min(8))).min(COPY_PAUSE_MAX),
            });
        }
        let now = sys::now();
        if let Some(Reverse((time, _))) = self.timers.peek() {
            shorten(time.since(now));
        }
        if self.first
            && let Some(time) = self.transport.next_expiry()
        {
            shorten(time.since(now));
        }
        timeout
    }

    fn take_events(&mut self) {
        if self.events.is_empty() {
            return;
        }
        let events = std::mem::take(&mut self.events);
        for event in &events {
            let ready = Ready::from_event(event);
            if ready.token == WAKE {
                continue;
            }
            let index = ready.token as usize;
            self.with_lane(index, |lane, turn| lane.ready(turn, ready));
        }
        self.events = events;
        self.events.clear();
    }

    fn take_kicks(&mut self) {
        // As many as there are now: a lane that is kicked again waits for the next round.
        for _ in 0..self.shared.kicks.len() {
            let Some((link, index)) = self.shared.kicks.pop() else {
                return;
            };
            let shared = &link.lanes[usize::from(index)];
            shared.kicked.store(false, Ordering::SeqCst);
            let token = match shared.token.load(Ordering::Relaxed) {
                LANE_ENDED => continue,
                LANE_NEW => {
                    let token = self.free.pop().unwrap_or_else(|| {
                        self.lanes.push(None);
                        self.lanes.len() - 1
                    });
                    shared.token.store(token, Ordering::Relaxed);
                    self.lanes[token] = Some(Box::new(Lane::new(link.clone(), index, token)));
                    token
                }
                token => token,
            };
            self.with_lane(token, |lane, turn| lane.kicked(turn));
        }
    }

    fn take_timers(&mut self) {
        let due = match self.timers.peek() {
            Some(Reverse((time, _))) => *time <= sys::now(),
            None => false,
        };
        if due {
            let now = sys::now();
            while let Some(Reverse((time, index))) = self.timers.peek().copied() {
                if time > now {
                    break;
                }
                self.timers.pop();
                self.with_lane(index, |lane, turn| lane.timer(turn));
            }
        }
        if self.first {
            self.transport.expire(sys::now);
        }
    }

    /// How much longer the copies may wait for others, if they may.
    fn copy_patience(&self) -> Option<Duration> {
        let lanes = self.copying.iter().map(|&index| self.lanes.get(index)?.as_ref());
        let can_wait = |lane: Option<&Box<Lane>>| lane.is_none_or(|lane| lane.copies_can_wait());
        if self.copying.is_empty() || !lanes.into_iter().all(can_wait) {
            return None;
        }
        let waited = sys::now().since(self.copies_polled);
        COPY_PATIENCE.checked_sub(waited).filter(|left| !left.is_zero())
    }

    fn poll_copies(&mut self) {
        if self.copying.is_empty() || self.copy_patience().is_some() {
            return;
        }
        self.copies_polled = sys::now();
        self.copy_polls = self.copy_polls.saturating_add(1);
        let mut starved = false;
        let mut moved = false;
        // All are looked at before any starts another copy in its turn: what is started together is copied together.
        for index in std::mem::take(&mut self.copying) {
            self.with_lane(index, |lane, turn| {
                lane.marked_copying = false;
                moved |= lane.poll_copies(turn);
                starved |= lane.starved();
            });
        }
        if moved {
            self.copy_polls = 0;
        }
        if starved {
            // Lanes that stand still give up the buffers they hold, so that a stalled peer starves no other.
            for index in 0..self.lanes.len() {
                self.with_lane(index, |lane, turn| lane.release_staging(turn));
            }
        }
    }

    fn give_turns(&mut self) {
        // One turn for each that is waiting now; those that want another wait for the next round.
        for _ in 0..self.runnable.len() {
            let Some(index) = self.runnable.pop_front() else { return };
            self.with_lane(index, |lane, turn| {
                lane.queued = false;
                lane.turn(turn);
            });
        }
    }

    /// Has a lane do something, and then brings queues and timers in line with what it wants.
    fn with_lane(&mut self, index: usize, act: impl FnOnce(&mut Lane, &Turn<'_>)) {
        let Some(Some(lane)) = self.lanes.get_mut(index) else {
            return;
        };
        let turn = Turn {
            worker: &self.shared,
            scrap: self.scrap.as_mut_ptr(),
            now: sys::now(),
        };
        act(lane, &turn);
        if lane.ended() {
            let link = lane.link.clone();
            self.lanes[index] = None;
            // Events for it that are still queued find nobody, or a lane that is none the worse for a look.
            self.free.push(index);
            self.transport.lane_ended(&link);
            return;
        }
        if lane.wants_turn() && !lane.queued {
            lane.queued = true;
            self.runnable.push_back(index);
        }
        if lane.copying() && !lane.marked_copying {
            lane.marked_copying = true;
            if self.copying.is_empty() {
                self.copy_polls = 0;
            }
            self.copying.push(index);
        }
        if let Some(time) = lane.take_timer() {
            self.timers.push(Reverse((time, index)));
        }
    }

    /// Closes all lanes, giving copies under way a bounded time.
    fn end(&mut self) {
        let limit = sys::now() + self.transport.config.shutdown_timeout;
        loop {
            self.take_kicks();
            for index in 0..self.lanes.len() {
                self.with_lane(index, |lane, turn| {
                    lane.link.open.close();
                    lane.kicked(turn);
                    lane.poll_copies(turn);
                });
            }
            if self.lanes.iter().all(Option::is_none) && self.shared.kicks.is_empty() {
                return;
            }
            if sys::now() >= limit {
                tracing::error!("copies did not end at shutdown: their blocks and staging are quarantined");
                return;
            }
            self.runnable.clear();
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// [`LaneShared::token`](crate::lane::LaneShared) before the lane's thread has seen it.
pub(crate) const LANE_NEW: usize = usize::MAX;
/// The same after the lane has ended.
pub(crate) const LANE_ENDED: usize = usize::MAX - 1;

//! Completion queues.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvxfer_rdma::sys::ibv_wc;
use parking_lot::{Condvar, Mutex};

use crate::event::ACKNOWLEDGE_LIMIT;
use crate::objects::{FakeCq, FakeQp};

/// A completion and what polling it gives back to its queue pair.
#[derive(Clone, Copy)]
pub(crate) struct Completion {
    pub(crate) wc: ibv_wc,
    pub(crate) qp: &'static FakeQp,
    /// Send requests whose slots are free once this is polled: its own and the unsignalled ones before it.
    pub(crate) sends: u32,
    /// As for receives.
    pub(crate) receives: u32,
}

/// What callers poll.
pub(crate) struct CompletionQueue {
    inner: Mutex<Inner>,
    acknowledged: Condvar,
}

struct Inner {
    ready: VecDeque<Completion>,
    /// Completions that the configuration holds back, and until when (none: until it lets them go). They take room,
    /// as in a queue that nobody is told about.
    withheld: VecDeque<(Option<Instant>, Completion)>,
    capacity: usize,
    armed: bool,
    overrun: bool,
    /// Events handed out and not acknowledged.
    unacknowledged: u32,
}

/// When a completion can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Visible {
    /// At once.
    Now,
    /// From then on.
    At(Instant),
    /// When the configuration lets it go.
    Withheld,
}

/// What became of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// It can be polled.
    Ready,
    /// The queue was full: it is dead from now on.
    Overrun,
    /// The queue was dead already.
    Dead,
}

impl CompletionQueue {
    /// A queue of `capacity` completions.
    pub(crate) fn new(capacity: usize) -> CompletionQueue {
        CompletionQueue {
            inner: Mutex::new(Inner {
                ready: VecDeque::with_capacity(capacity.min(65_536)),
                withheld: VecDeque::new(),
                capacity,
                armed: false,
                overrun: false,
                unacknowledged: 0,
            }),
            acknowledged: Condvar::new(),
        }
    }

    /// Takes up to `limit` completions, handing each to `take`; returns how many.
    pub(crate) fn poll(&self, limit: usize, mut take: impl FnMut(usize, &ibv_wc)) -> usize {
        let mut inner = self.inner.lock();
        let count = limit.min(inner.ready.len());
        for index in 0..count {
            if let Some(completion) = inner.ready.pop_front() {
                completion.qp.sends_used.fetch_sub(completion.sends, Ordering::Release);
                completion
                    .qp
                    .receives_used
                    .fetch_sub(completion.receives, Ordering::Release);
                take(index, &completion.wc);
            }
        }
        count
    }

    /// Arms it: the next completion raises one event.
    pub(crate) fn arm(&self) {
        self.inner.lock().armed = true;
    }

    /// Takes the completions of a queue pair out, which is reset or destroyed; returns how many there were.
    pub(crate) fn forget(&self, qp: &FakeQp) -> usize {
        let mut inner = self.inner.lock();
        let before = inner.ready.len() + inner.withheld.len();
        inner.ready.retain(|completion| !std::ptr::eq(completion.qp, qp));
        inner
            .withheld
            .retain(|(_, completion)| !std::ptr::eq(completion.qp, qp));
        before - inner.ready.len() - inner.withheld.len()
    }

    /// Counts an acknowledgement of events; false if so many are not open.
    pub(crate) fn acknowledge(&self, count: u32) -> bool {
        let mut inner = self.inner.lock();
        let Some(left) = inner.unacknowledged.checked_sub(count) else {
            return false;
        };
        inner.unacknowledged = left;
        self.acknowledged.notify_all();
        true
    }

    /// Frees what a destroyed queue holds.
    pub(crate) fn let_go(&self) {
        let mut inner = self.inner.lock();
        inner.ready = VecDeque::new();
        inner.withheld = VecDeque::new();
    }

    /// Counts an event handed out.
    pub(crate) fn handed_out(&self) {
        self.inner.lock().unacknowledged += 1;
    }

    /// Waits a while until all events are acknowledged; false if they are not.
    pub(crate) fn wait_acknowledged(&self) -> bool {
        let mut inner = self.inner.lock();
        let limit = std::time::Instant::now() + ACKNOWLEDGE_LIMIT;
        while inner.unacknowledged != 0 {
            if self.acknowledged.wait_until(&mut inner, limit).timed_out() {
                return false;
            }
        }
        true
    }
}

impl FakeCq {
    /// Adds a completion, and raises the channel's event if the queue is armed.
    pub(crate) fn push(&'static self, completion: Completion, visible: Visible) -> Pushed {
        let mut inner = self.queue.inner.lock();
        if inner.overrun {
            return Pushed::Dead;
        }
        if inner.ready.len() + inner.withheld.len() >= inner.capacity {
            inner.overrun = true;
            return Pushed::Overrun;
        }
        match visible {
            Visible::Now if inner.withheld.is_empty() => {
                inner.ready.push_back(completion);
                self.ring(&mut inner);
            }
            // Not before those that came first.
            Visible::Now => {
                let last = inner.withheld.back().and_then(|(due, _)| *due);
                inner.withheld.push_back((last, completion));
            }
            Visible::At(due) => inner.withheld.push_back((Some(due), completion)),
            Visible::Withheld => inner.withheld.push_back((None, completion)),
        }
        Pushed::Ready
    }

    /// Lets the withheld completions go.
    pub(crate) fn release(&'static self) {
        let mut inner = self.queue.inner.lock();
        if inner.withheld.is_empty() {
            return;
        }
        let withheld = std::mem::take(&mut inner.withheld);
        inner
            .ready
            .extend(withheld.into_iter().map(|(_, completion)| completion));
        self.ring(&mut inner);
    }

    /// Lets those delayed completions go whose time has come; gives the time of the next.
    pub(crate) fn release_due(&'static self, now: Instant) -> Option<Instant> {
        let mut inner = self.queue.inner.lock();
        let mut any = false;
        while let Some((Some(due), completion)) = inner.withheld.front().copied() {
            if due > now {
                break;
            }
            inner.withheld.pop_front();
            inner.ready.push_back(completion);
            any = true;
        }
        if any {
            self.ring(&mut inner);
        }
        inner.withheld.front().and_then(|(due, _)| *due)
    }

    fn ring(&'static self, inner: &mut Inner) {
        if inner.armed
            && let Some(channel) = self.channel
        {
            inner.armed = false;
            channel.channel.raise(self);
        }
    }
}

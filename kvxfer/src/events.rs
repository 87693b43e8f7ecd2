//! Events: an opt-in queue of what happened to handles, drained in batches, with one pollable descriptor.
//!
//! A handle that has events on reserves the places it may need when it is opened (one for its end, one for each kind
//! of notice). So the queue is bounded by the handles that may be open, cannot overflow and loses nothing.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};

use kvxfer_core::machine::{HandleId, Notice};
use kvxfer_core::{Error, ErrorKind, Result};

/// Something that happened to a handle that was opened with `events: Some(data)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The caller's number from the handle's options.
    pub data: u64,
    /// The handle, as its `id()` says.
    pub handle: HandleId,
    /// What happened.
    pub kind: EventKind,
}

/// What happened to a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// A claim met its offer at all sources, or an offer got a claim. Several before a drain are told once.
    Matched,
    /// The offer was restarted: progress before is void. Several before a drain are told once.
    Restarted,
    /// The handle has ended; the result is in its completion. Always the handle's last event.
    Ended {
        /// The kind of its error; `None` if it ended well.
        error: Option<ErrorKind>,
    },
}

/// The endpoint's events. All views of one endpoint drain the same queue.
#[derive(Clone)]
pub struct Events {
    queue: Arc<EventQueue>,
}

impl Events {
    pub(crate) fn new(queue: Arc<EventQueue>) -> Self {
        Events { queue }
    }

    /// Moves up to `max` events, oldest first, to the end of `out`; returns how many.
    pub fn drain(&self, out: &mut Vec<Event>, max: usize) -> usize {
        self.queue.drain(out, max)
    }

    /// A descriptor that polls readable while events wait. Only for `poll`, `epoll` and the like: do not read it.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.queue.signal.as_fd()
    }

    /// Blocks until an event waits, at most for `timeout`; whether one does.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.queue.wait(timeout)
    }
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Events({} waiting)", self.queue.depth())
    }
}

/// A handle's part in the queue.
#[derive(Debug)]
pub(crate) struct EventSource {
    data: u64,
    /// Which notices of this handle wait in the queue, each kind at most once, and whether its end was told.
    pending: AtomicU8,
}

const MATCHED: u8 = 1;
const RESTARTED: u8 = 2;
/// The end has been told: by the data thread that saw it first, or by the control plane.
const ENDED: u8 = 4;
/// Places a handle may need at once: its end, and each kind of notice once.
const PLACES: usize = 3;

/// The queue behind [`Events`].
pub(crate) struct EventQueue {
    waiting: Mutex<Waiting>,
    arrived: Condvar,
    signal: OwnedFd,
}

struct Waiting {
    events: VecDeque<(Arc<EventSource>, Event)>,
    /// Places reserved by open handles, used or not.
    reserved: usize,
}

impl EventQueue {
    pub(crate) fn new() -> Result<Arc<EventQueue>> {
        let signal = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
            Error::new(ErrorKind::ResourceExhausted, "eventfd")
                .because(errno.to_string())
                .remedy("raise the limit of open files (ulimit -n)")
        })?;
        Ok(Arc::new(EventQueue {
            waiting: Mutex::new(Waiting {
                events: VecDeque::new(),
                reserved: 0,
            }),
            arrived: Condvar::new(),
            signal,
        }))
    }

    /// Reserves a handle's places, so that what happens later never has to allocate.
    pub(crate) fn reserve(&self, data: u64) -> Arc<EventSource> {
        let mut waiting = self.waiting.lock();
        waiting.reserved += PLACES;
        let reserved = waiting.reserved;
        if waiting.events.capacity() < reserved {
            let more = reserved - waiting.events.len();
            waiting.events.reserve(more);
        }
        Arc::new(EventSource {
            data,
            pending: AtomicU8::new(0),
        })
    }

    /// Gives a handle's places back when it could not be opened after all.
    pub(crate) fn unreserve(&self) {
        let mut waiting = self.waiting.lock();
        waiting.reserved = waiting.reserved.saturating_sub(PLACES);
    }

    pub(crate) fn notice(&self, source: &Arc<EventSource>, handle: HandleId, notice: &Notice) {
        let (bit, kind) = match notice {
            Notice::Matched => (MATCHED, EventKind::Matched),
            Notice::Restarted => (RESTARTED, EventKind::Restarted),
        };
        if source.pending.fetch_or(bit, Ordering::AcqRel) & bit == 0 {
            self.push(source, handle, kind);
        }
    }

    pub(crate) fn ended(&self, source: &Arc<EventSource>, handle: HandleId, error: Option<ErrorKind>) {
        if source.pending.fetch_or(ENDED, Ordering::AcqRel) & ENDED == 0 {
            self.push(source, handle, EventKind::Ended { error });
        }
    }

    /// Events waiting.
    pub(crate) fn depth(&self) -> usize {
        self.waiting.lock().events.len()
    }

    fn push(&self, source: &Arc<EventSource>, handle: HandleId, kind: EventKind) {
        let event = Event {
            data: source.data,
            handle,
            kind,
        };
        let mut waiting = self.waiting.lock();
        if waiting.events.is_empty() {
            // Under the lock, so that the descriptor and the queue never disagree. It cannot fail: the counter is 0.
            let _ = rustix::io::write(&self.signal, &1u64.to_ne_bytes());
        }
        waiting.events.push_back((Arc::clone(source), event));
        drop(waiting);
        self.arrived.notify_all();
    }

    fn drain(&self, out: &mut Vec<Event>, max: usize) -> usize {
        let mut waiting = self.waiting.lock();
        let count = max.min(waiting.events.len());
        for (source, event) in waiting.events.drain(..count) {
            match event.kind {
                EventKind::Matched => drop(source.pending.fetch_and(!MATCHED, Ordering::AcqRel)),
                EventKind::Restarted => drop(source.pending.fetch_and(!RESTARTED, Ordering::AcqRel)),
                EventKind::Ended { .. } => {}
            }
            out.push(event);
        }
        let ended = out[out.len() - count..]
            .iter()
            .filter(|event| matches!(event.kind, EventKind::Ended { .. }))
            .count();
        waiting.reserved = waiting.reserved.saturating_sub(ended * PLACES);
        if count > 0 && waiting.events.is_empty() {
            let mut counter = [0u8; 8];
            let _ = rustix::io::read(&self.signal, &mut counter);
        }
        count
    }

    fn wait(&self, timeout: Duration) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        let mut waiting = self.waiting.lock();
        while waiting.events.is_empty() {
            match deadline {
                Some(deadline) => {
                    if self.arrived.wait_until(&mut waiting, deadline).timed_out() {
                        return !waiting.events.is_empty();
                    }
                }
                None => self.arrived.wait(&mut waiting),
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    fn readable(events: &Events) -> bool {
        let zero = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let fd = events.fd();
        let mut polled = [PollFd::new(&fd, PollFlags::IN)];
        poll(&mut polled, Some(&zero)).unwrap() == 1
    }

    #[test]
    fn the_descriptor_agrees_with_the_queue() {
        let queue = EventQueue::new().unwrap();
        let events = Events::new(Arc::clone(&queue));
        let source = queue.reserve(42);
        assert!(!readable(&events));
        queue.notice(&source, HandleId(1), &Notice::Matched);
        queue.ended(&source, HandleId(1), None);
        queue.ended(&source, HandleId(1), None);
        assert!(readable(&events));
        let mut out = Vec::new();
        assert_eq!(events.drain(&mut out, 1), 1);
        assert!(readable(&events));
        assert_eq!(events.drain(&mut out, 9), 1);
        assert!(!readable(&events));
        assert_eq!(out[0].kind, EventKind::Matched);
        assert_eq!(out[1].kind, EventKind::Ended { error: None });
        assert!(out.iter().all(|event| event.data == 42));
        assert_eq!(queue.waiting.lock().reserved, 0);
        assert_eq!(queue.depth(), 0);
    }

    #[test]
    fn repeated_notices_take_one_place() {
        let queue = EventQueue::new().unwrap();
        let events = Events::new(Arc::clone(&queue));
        let source = queue.reserve(1);
        for _ in 0..100 {
            queue.notice(&source, HandleId(1), &Notice::Restarted);
        }
        let mut out = Vec::new();
        assert_eq!(events.drain(&mut out, 1000), 1);
        queue.notice(&source, HandleId(1), &Notice::Restarted);
        assert_eq!(events.drain(&mut out, 1000), 1);
    }

    #[test]
    fn a_wait_ends_with_an_event_or_with_time() {
        let queue = EventQueue::new().unwrap();
        let events = Events::new(Arc::clone(&queue));
        assert!(!events.wait(Duration::from_millis(1)));
        let source = queue.reserve(1);
        let waiting = {
            let events = events.clone();
            std::thread::spawn(move || events.wait(Duration::from_secs(20)))
        };
        queue.ended(&source, HandleId(1), Some(ErrorKind::Cancelled));
        assert!(waiting.join().unwrap());
    }
}

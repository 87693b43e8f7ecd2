//! What links and slots report, kept for the test to look at and to wait for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvxfer_core::flow::{LaneName, SendEvent, SlotWatcher, TransferId};
use kvxfer_core::transport::{LinkEvent, LinkWatcher};
use kvxfer_core::{Error, Incarnation};
use parking_lot::{Condvar, Mutex};

use super::PATIENCE;

/// What a slot's watcher saw.
#[derive(Default)]
pub struct Arrival {
    state: Mutex<Option<Option<Arc<[u8]>>>>,
    changed: Condvar,
    /// How often it was told: more than once is a defect.
    pub times: AtomicU64,
}

impl Arrival {
    /// Waits for the arrival and gives the message that came with it, if any; `None` if it does not come in time.
    pub fn wait(&self, patience: Duration) -> Option<Option<Arc<[u8]>>> {
        let mut state = self.state.lock();
        if state.is_none() {
            self.changed.wait_for(&mut state, patience);
        }
        state.clone()
    }
}

impl SlotWatcher for Arrival {
    fn arrived(&self, message: Option<Arc<[u8]>>) {
        self.times.fetch_add(1, Ordering::SeqCst);
        *self.state.lock() = Some(message);
        self.changed.notify_all();
    }
}

/// Everything a link has reported, in order; and the way to the other end.
#[derive(Default)]
pub struct Log {
    /// All of it since the last [`Log::clear`].
    pub events: Mutex<Vec<LinkEvent>>,
    changed: Condvar,
    relay: Mutex<Option<mpsc::Sender<LinkEvent>>>,
    /// While set, what the link says stays here: a session whose connection is broken, or a peer that does not read.
    held: AtomicBool,
    kept: Mutex<Vec<LinkEvent>>,
}

impl LinkWatcher for Log {
    fn link_event(&self, _peer: Incarnation, event: LinkEvent) {
        if matches!(
            event,
            LinkEvent::LaneLost { .. } | LinkEvent::LaneFenced { .. } | LinkEvent::Message(_)
        ) {
            let mut kept = self.kept.lock();
            if self.held.load(Ordering::SeqCst) {
                kept.push(event.clone());
            } else if let Some(relay) = &*self.relay.lock() {
                let _ = relay.send(event.clone());
            }
        }
        self.events.lock().push(event);
        self.changed.notify_all();
    }
}

impl Log {
    /// Where what the link says to its other end goes from now on; nowhere if there is nobody any more.
    pub(super) fn relay_to(&self, relay: Option<mpsc::Sender<LinkEvent>>) {
        *self.relay.lock() = relay;
    }

    /// Lets what was held go, in order.
    pub fn release(&self) {
        let mut kept = self.kept.lock();
        self.held.store(false, Ordering::SeqCst);
        if let Some(relay) = &*self.relay.lock() {
            for event in kept.drain(..) {
                let _ = relay.send(event);
            }
        }
    }

    /// Lets the first `count` bodies that were held go; the rest stays.
    pub fn release_some(&self, count: usize) {
        let mut kept = self.kept.lock();
        let count = count.min(kept.len());
        if let Some(relay) = &*self.relay.lock() {
            for event in kept.drain(..count) {
                let _ = relay.send(event);
            }
        }
    }

    /// From now on nothing of what the link says comes through.
    pub fn hold(&self) {
        self.held.store(true, Ordering::SeqCst);
    }

    /// How much is held.
    pub fn kept(&self) -> usize {
        self.kept.lock().len()
    }

    /// Waits until the link is up.
    pub fn up(&self) {
        self.wait("link", |event| matches!(event, LinkEvent::Up).then_some(()));
    }

    /// Forgets what was reported.
    pub fn clear(&self) {
        self.events.lock().clear();
    }

    /// Waits for an event that fits.
    ///
    /// # Panics
    /// If it does not come within [`PATIENCE`].
    pub fn wait<T>(&self, what: &str, mut fits: impl FnMut(&LinkEvent) -> Option<T>) -> T {
        self.wait_for(PATIENCE, &mut fits)
            .unwrap_or_else(|| panic!("no {what} within {PATIENCE:?}: {:?}", self.tail()))
    }

    /// Waits for an event that fits; `None` if it does not come in time.
    pub fn wait_for<T>(&self, patience: Duration, mut fits: impl FnMut(&LinkEvent) -> Option<T>) -> Option<T> {
        let end = Instant::now() + patience;
        let mut events = self.events.lock();
        loop {
            if let Some(found) = events.iter().find_map(&mut fits) {
                return Some(found);
            }
            if self.changed.wait_until(&mut events, end).timed_out() {
                return events.iter().find_map(&mut fits);
            }
        }
    }

    /// Waits until a transfer has arrived.
    pub fn arrived(&self, id: TransferId) {
        self.wait("arrival", |event| {
            matches!(event, LinkEvent::Send(SendEvent::Arrived(arrived)) if *arrived == id).then_some(())
        });
    }

    /// Waits until a transfer was refused.
    pub fn refused(&self, id: TransferId) {
        self.wait("refusal", |event| {
            matches!(event, LinkEvent::Send(SendEvent::Refused(refused)) if *refused == id).then_some(())
        });
    }

    /// Waits until a stopped transfer is quiet.
    pub fn quiet(&self, id: TransferId) {
        self.wait("quiet", |event| {
            matches!(event, LinkEvent::Send(SendEvent::Quiet(quiet)) if *quiet == id).then_some(())
        });
    }

    /// Waits until the link has ended.
    pub fn closed(&self) {
        self.wait("end of the link", |event| {
            matches!(event, LinkEvent::Closed).then_some(())
        });
    }

    /// The lanes that were lost so far: each with how many chunks were outstanding on it, and why.
    pub fn lost(&self) -> Vec<(LaneName, usize, Error)> {
        let events = self.events.lock();
        events
            .iter()
            .filter_map(|event| match event {
                LinkEvent::LaneLost { lane, chunks, error } => Some((*lane, chunks.len(), error.clone())),
                _ => None,
            })
            .collect()
    }

    /// How many of the events so far fit.
    pub fn count(&self, fits: impl Fn(&LinkEvent) -> bool) -> usize {
        self.events.lock().iter().filter(|event| fits(event)).count()
    }

    /// The last of what was reported.
    pub fn tail(&self) -> Vec<String> {
        let events = self.events.lock();
        let seen = events.iter().filter(|event| !matches!(event, LinkEvent::Message(_)));
        let all: Vec<_> = seen.map(|event| format!("{event:?}")).collect();
        all[all.len().saturating_sub(12)..].to_vec()
    }
}

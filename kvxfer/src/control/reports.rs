//! From data threads to the control thread: a queue without locks and a wake-up.
//!
//! Data threads never take the control plane's lock: they leave what they have to say here and go on. Most of it wakes
//! the control thread at once. Two things can wait for a moment, because whoever cares knows already or is not
//! looking: the arrival of a slot whose grant was completed on the data thread, and the arrival of a push that nobody
//! waits for. They are handled within [`LAZY`], several at a time: in a ping-pong of small pushes this saves two of
//! five thread switches per hop.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam::queue::SegQueue;
use tokio::sync::Notify;

use kvxfer_core::flow::SendEvent;
use kvxfer_core::machine::EventId;
use kvxfer_core::transport::{LinkEvent, LinkWatcher};
use kvxfer_core::{Incarnation, Result};

use crate::clock;

use super::timer::Timer;

/// How long a report that nobody waits for may stay.
pub(super) const LAZY: Duration = Duration::from_millis(1);
/// With so many waiting they are worth a wake-up.
const LAZY_MAX: usize = 8;

thread_local! {
    /// The slot whose arrival this thread reports next has been seen to.
    static SEEN_TO: Cell<bool> = const { Cell::new(false) };
}

/// What a link said.
pub(crate) struct Report {
    /// Which link (a peer may have had several).
    pub(crate) link: u64,
    /// Whose.
    pub(crate) peer: Incarnation,
    /// What.
    pub(crate) event: LinkEvent,
}

/// The queue of reports. Bounded by what links may have outstanding: each event answers or ends something.
pub(crate) struct Reports {
    queue: SegQueue<Report>,
    /// Of what the application's parts wait for: how it went.
    happened: SegQueue<(EventId, Result<()>)>,
    next_event: AtomicU64,
    /// Set from the first report until the control thread looks: one wake-up serves all in between.
    waiting: AtomicBool,
    wake: Notify,
    /// Reports since the last look that woke nobody.
    lazy: AtomicUsize,
    /// Work was begun that waits for the timer, unless somebody wakes the control thread before.
    deferred: AtomicBool,
    /// Threads and futures that wait for a transfer of ours to end.
    eager: AtomicUsize,
    timer: Timer,
}

impl Reports {
    pub(crate) fn new(timer: Timer) -> Arc<Reports> {
        Arc::new(Reports {
            queue: SegQueue::new(),
            happened: SegQueue::new(),
            next_event: AtomicU64::new(1),
            waiting: AtomicBool::new(false),
            wake: Notify::new(),
            lazy: AtomicUsize::new(0),
            deferred: AtomicBool::new(false),
            eager: AtomicUsize::new(0),
            timer,
        })
    }

    /// Leaves a report and wakes the control thread if it does not know yet.
    fn push(&self, report: Report) {
        self.queue.push(report);
        self.ring();
    }

    /// A number for something that parts may wait for.
    pub(crate) fn next_event(&self) -> EventId {
        EventId(self.next_event.fetch_add(1, Ordering::Relaxed))
    }

    /// Something that parts may wait for has happened, or failed. From any thread.
    pub(crate) fn happened(&self, event: EventId, result: Result<()>) {
        self.happened.push((event, result));
        self.ring();
    }

    pub(crate) fn pop_happened(&self) -> Option<(EventId, Result<()>)> {
        self.happened.pop()
    }

    /// Leaves a report that can wait for a moment.
    fn push_lazily(&self, report: Report) {
        self.queue.push(report);
        let before = self.lazy.fetch_add(1, Ordering::SeqCst);
        // Looked at after the report is in the queue: who begins to wait later looks at the queue itself.
        if before + 1 >= LAZY_MAX || self.eager.load(Ordering::SeqCst) > 0 {
            self.ring();
        } else if before == 0 && !self.deferred.load(Ordering::SeqCst) {
            self.timer.set(clock::now() + LAZY);
        }
    }

    /// Wakes the control thread.
    pub(super) fn ring(&self) {
        if !self.waiting.swap(true, Ordering::AcqRel) {
            self.wake.notify_one();
        }
    }

    /// Notes that work waits for the timer. True if the caller has to set it: for the first since the last look.
    pub(super) fn defer(&self) -> bool {
        !self.deferred.swap(true, Ordering::SeqCst)
    }

    /// To be called before looking: reports from now on wake again. Whether work was deferred.
    pub(crate) fn look(&self) -> bool {
        self.lazy.store(0, Ordering::SeqCst);
        self.waiting.swap(false, Ordering::AcqRel);
        self.deferred.swap(false, Ordering::SeqCst)
    }

    pub(crate) fn pop(&self) -> Option<Report> {
        self.queue.pop()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.happened.is_empty()
    }

    /// Whether a report waits that the timer was set for.
    pub(super) fn has_lazy(&self) -> bool {
        self.lazy.load(Ordering::SeqCst) > 0
    }

    /// Somebody looks at a transfer: nothing about it shall wait.
    pub(crate) fn nudge(&self) {
        if self.has_lazy() || self.deferred.load(Ordering::SeqCst) {
            self.ring();
        }
    }

    /// Somebody waits for a transfer, until [`waits_no_more`](Self::waits_no_more).
    pub(crate) fn waits(&self) {
        self.eager.fetch_add(1, Ordering::SeqCst);
        self.nudge();
    }

    pub(crate) fn waits_no_more(&self) {
        self.eager.fetch_sub(1, Ordering::SeqCst);
    }

    /// Resolves once the control thread has been woken.
    pub(crate) async fn woken(&self) {
        self.wake.notified().await;
    }
}

/// Says, on a data thread, that whoever waits for the slot whose arrival it is about to report knows already.
pub(crate) fn seen_to() {
    SEEN_TO.set(true);
}

/// The watcher that one link is given.
pub(crate) struct Watcher {
    pub(crate) link: u64,
    pub(crate) reports: Arc<Reports>,
}

impl LinkWatcher for Watcher {
    fn link_event(&self, peer: Incarnation, event: LinkEvent) {
        let lazy = match &event {
            // Nothing follows from it: the owner of the destination says how a transfer ended.
            LinkEvent::Send(SendEvent::Drained(_)) => return,
            LinkEvent::SlotArrived { .. } => SEEN_TO.replace(false),
            LinkEvent::Send(SendEvent::Arrived(_)) => true,
            _ => false,
        };
        let report = Report {
            link: self.link,
            peer,
            event,
        };
        match lazy {
            true => self.reports.push_lazily(report),
            false => self.reports.push(report),
        }
    }
}

#[cfg(test)]
mod tests {
    use kvxfer_core::flow::TransferId;
    use kvxfer_core::{Generation, SlotId};

    use super::*;

    fn watcher() -> Watcher {
        Watcher {
            link: 1,
            reports: Reports::new(Timer::new().unwrap()),
        }
    }

    fn woken(watcher: &Watcher) -> bool {
        let woken = watcher.reports.waiting.load(Ordering::SeqCst);
        watcher.reports.look();
        while watcher.reports.pop().is_some() {}
        woken
    }

    const PEER: Incarnation = Incarnation::from_bits(1);

    fn arrived() -> LinkEvent {
        LinkEvent::SlotArrived {
            slot: SlotId(1),
            generation: Generation(1),
        }
    }

    #[test]
    fn what_somebody_waits_for_wakes_at_once() {
        let watcher = watcher();
        watcher.link_event(PEER, arrived());
        assert!(woken(&watcher));
        seen_to();
        watcher.link_event(PEER, arrived());
        assert!(watcher.reports.has_lazy());
        assert!(!woken(&watcher));
        // Only the next one was seen to.
        watcher.link_event(PEER, arrived());
        assert!(woken(&watcher));
        let sent = || LinkEvent::Send(SendEvent::Arrived(TransferId(1)));
        watcher.link_event(PEER, sent());
        assert!(!watcher.reports.waiting.load(Ordering::SeqCst));
        watcher.reports.waits();
        assert!(woken(&watcher), "what waits already is woken for");
        watcher.link_event(PEER, sent());
        assert!(woken(&watcher));
        watcher.reports.waits_no_more();
        watcher.link_event(PEER, sent());
        assert!(!woken(&watcher));
    }

    #[test]
    fn deferred_work_waits_for_the_timer_or_for_who_looks() {
        let watcher = watcher();
        assert!(watcher.reports.defer(), "the first has the timer set");
        assert!(!watcher.reports.defer());
        assert!(!watcher.reports.waiting.load(Ordering::SeqCst));
        watcher.reports.nudge();
        assert!(watcher.reports.waiting.load(Ordering::SeqCst), "who looks hurries it");
        assert!(watcher.reports.look(), "the turn is told that something was deferred");
        assert!(!watcher.reports.look());
        assert!(watcher.reports.defer(), "after a turn the timer is to be set again");
        watcher.reports.waits();
        assert!(woken(&watcher), "who waits hurries it");
        watcher.reports.waits_no_more();
        assert!(!woken(&watcher));
    }

    #[test]
    fn many_are_worth_a_wake_up() {
        let watcher = watcher();
        for _ in 0..LAZY_MAX - 1 {
            watcher.link_event(PEER, LinkEvent::Send(SendEvent::Arrived(TransferId(1))));
        }
        assert!(!watcher.reports.waiting.load(Ordering::SeqCst));
        watcher.link_event(PEER, LinkEvent::Send(SendEvent::Arrived(TransferId(1))));
        assert!(woken(&watcher));
        watcher.link_event(PEER, LinkEvent::Send(SendEvent::Drained(TransferId(1))));
        assert!(watcher.reports.is_empty());
    }
}

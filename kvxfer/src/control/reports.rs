//! From data threads to the control thread: a queue without locks and a wake-up.
//!
//! Data threads never take the control plane's lock: they leave what they have to say here and go on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam::queue::SegQueue;
use tokio::sync::Notify;

use kvxfer_core::Incarnation;
use kvxfer_core::transport::{LinkEvent, LinkWatcher};

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
    /// Set from the first report until the control thread looks: one wake-up serves all in between.
    waiting: AtomicBool,
    wake: Notify,
}

impl Reports {
    pub(crate) fn new() -> Arc<Reports> {
        Arc::new(Reports {
            queue: SegQueue::new(),
            waiting: AtomicBool::new(false),
            wake: Notify::new(),
        })
    }

    /// Leaves a report and wakes the control thread if it does not know yet.
    pub(crate) fn push(&self, report: Report) {
        self.queue.push(report);
        self.ring();
    }

    /// Wakes the control thread.
    pub(crate) fn ring(&self) {
        if !self.waiting.swap(true, Ordering::AcqRel) {
            self.wake.notify_one();
        }
    }

    /// To be called before looking: reports from now on wake again.
    pub(crate) fn look(&self) {
        self.waiting.swap(false, Ordering::AcqRel);
    }

    pub(crate) fn pop(&self) -> Option<Report> {
        self.queue.pop()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Resolves once the control thread has been woken.
    pub(crate) async fn woken(&self) {
        self.wake.notified().await;
    }
}

/// The watcher that one link is given.
pub(crate) struct Watcher {
    pub(crate) link: u64,
    pub(crate) reports: Arc<Reports>,
}

impl LinkWatcher for Watcher {
    fn link_event(&self, peer: Incarnation, event: LinkEvent) {
        self.reports.push(Report {
            link: self.link,
            peer,
            event,
        });
    }
}

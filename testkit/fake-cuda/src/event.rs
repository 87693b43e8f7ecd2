//! Events: a signal for each time one is recorded.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUresult;
use parking_lot::{Condvar, Mutex};

use crate::context::Context;

/// Something that happens once.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    state: Mutex<Option<(Instant, Option<CUresult>)>>,
    changed: Condvar,
}

impl Signal {
    /// It has happened: well, or with the error of what came before.
    pub(crate) fn happen(&self, error: Option<CUresult>) {
        *self.state.lock() = Some((Instant::now(), error));
        self.changed.notify_all();
    }

    /// Whether it has happened, and how.
    pub(crate) fn state(&self) -> Option<Result<Instant, CUresult>> {
        self.state.lock().map(|(when, error)| error.map_or(Ok(when), Err))
    }

    /// Waits until it has happened, at most that long; whether it has.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let mut state = self.state.lock();
        if state.is_none() {
            self.changed.wait_for(&mut state, limit);
        }
        state.is_some()
    }
}

/// An event.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) context: Arc<Context>,
    pub(crate) engine: bool,
    pub(crate) timing: bool,
    record: Mutex<Option<Arc<Signal>>>,
    /// Last recorded in a stream that was capturing: the capture's number.
    captured: Mutex<Option<usize>>,
    has_captured: AtomicBool,
}

impl Event {
    /// One that was never recorded.
    pub(crate) fn new(context: Arc<Context>, engine: bool, timing: bool) -> Event {
        Event {
            context,
            engine,
            timing,
            record: Mutex::new(None),
            captured: Mutex::new(None),
            has_captured: AtomicBool::new(false),
        }
    }

    /// Recorded anew: what now has to happen.
    pub(crate) fn record(&self) -> Arc<Signal> {
        let signal = Arc::new(Signal::default());
        self.has_captured.store(false, Ordering::Release);
        *self.captured.lock() = None;
        *self.record.lock() = Some(signal.clone());
        signal
    }

    /// Recorded in a capture.
    pub(crate) fn record_captured(&self, capture: usize) {
        self.has_captured.store(true, Ordering::Release);
        *self.captured.lock() = Some(capture);
    }

    /// What was last recorded.
    pub(crate) fn last(&self) -> Option<Arc<Signal>> {
        self.record.lock().clone()
    }

    /// The capture that it was last recorded in.
    pub(crate) fn capture(&self) -> Option<usize> {
        if !self.has_captured.load(Ordering::Acquire) {
            return None;
        }
        *self.captured.lock()
    }
}

//! Waiting without the interpreter's lock, and the end of the interpreter.
//!
//! Nothing of the library ever needs the lock: its threads only write to descriptors. What needs care is the other
//! way round, a Python thread that waits inside the library when the interpreter goes away. So waits are cut into
//! slices, and before the interpreter ends every endpoint is closed, which ends all handles and so those waits.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

use kvxfer::{Error, ErrorKind};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::endpoint::Core;
use crate::error::raise;

/// A wait looks for signals (Ctrl-C) and for the interpreter's end this often.
const SLICE: Duration = Duration::from_millis(100);
/// What closing all endpoints at exit may take.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);
/// What threads may take to leave the library after that.
const LEAVE_LIMIT: Duration = Duration::from_secs(1);

/// Endpoints that may be open. Taken only with the interpreter's lock held, so never held across a fork.
static ENDPOINTS: Mutex<Vec<(u32, Weak<Core>)>> = Mutex::new(Vec::new());
static INSIDE: AtomicUsize = AtomicUsize::new(0);
static EXITING: AtomicBool = AtomicBool::new(false);

/// Remembers an endpoint, to close it at exit.
pub(crate) fn remember(core: &Arc<Core>) {
    let mut endpoints = ENDPOINTS.lock();
    endpoints.retain(|(_, known)| known.strong_count() > 0);
    endpoints.push((crate::fork::generation(), Arc::downgrade(core)));
}

/// Whether the interpreter is ending.
pub(crate) fn is_near() -> bool {
    EXITING.load(Ordering::Relaxed)
}

/// Runs `work` without the interpreter's lock.
pub(crate) fn without_lock<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    INSIDE.fetch_add(1, Ordering::SeqCst);
    let result = py.detach(work);
    INSIDE.fetch_sub(1, Ordering::SeqCst);
    result
}

/// Waits in slices without the interpreter's lock until `step` (which waits at most for what it is given) has a
/// result. `None`: the time is over. `Err`: a signal handler raised, or the interpreter ends.
pub(crate) fn wait<T: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    step: impl Fn(Duration) -> Option<T> + Sync,
) -> PyResult<Option<T>> {
    let began = Instant::now();
    loop {
        let left = match timeout {
            Some(timeout) => timeout.saturating_sub(began.elapsed()),
            None => Duration::MAX,
        };
        let slice = left.min(SLICE);
        if let Some(result) = without_lock(py, || step(slice)) {
            return Ok(Some(result));
        }
        if slice == left {
            return Ok(None);
        }
        py.check_signals()?;
        if is_near() {
            return Err(raise(
                Error::new(ErrorKind::Closed, "a wait").because("the interpreter is ending"),
            ));
        }
    }
}

/// Runs `work` on a thread of its own and waits for it as [`wait`] does: for a call that cannot be cut into slices. It
/// goes on when the time is over (`None`) or a signal handler raised.
pub(crate) fn beside<T: Send + 'static>(
    py: Python<'_>,
    timeout: Option<Duration>,
    work: impl FnOnce() -> T + Clone + Send + 'static,
) -> PyResult<Option<T>> {
    let (tell, told) = mpsc::channel();
    let there = work.clone();
    let thread = std::thread::Builder::new().name("kvxfer-beside".into());
    // Nobody may hear it any more.
    if thread.spawn(move || drop(tell.send(there()))).is_err() {
        return Ok(Some(without_lock(py, work)));
    }
    let told = Mutex::new(told);
    let done = wait(py, timeout, |slice| match told.lock().recv_timeout(slice) {
        Ok(result) => Some(Some(result)),
        Err(mpsc::RecvTimeoutError::Timeout) => None,
        Err(mpsc::RecvTimeoutError::Disconnected) => Some(None),
    })?;
    match done {
        None => Ok(None),
        Some(Some(result)) => Ok(Some(result)),
        Some(None) => Err(raise(
            Error::new(ErrorKind::Internal, "a thread of the binding").because("it panicked"),
        )),
    }
}

/// Whether a `with` statement's body raised, from what `__exit__` is given.
pub(crate) fn raised(exception: &Bound<'_, PyTuple>) -> bool {
    exception.get_item(0).is_ok_and(|class| !class.is_none())
}

/// Closes every endpoint of this process, within a few seconds: what `atexit` runs.
#[pyfunction]
pub(crate) fn _close_all(py: Python<'_>) {
    EXITING.store(true, Ordering::Relaxed);
    let here = crate::fork::generation();
    let mut open = Vec::new();
    for (generation, endpoint) in ENDPOINTS.lock().drain(..) {
        // Of a parent's endpoints not even the reference count is looked at.
        match generation == here {
            true => open.extend(endpoint.upgrade()),
            false => std::mem::forget(endpoint),
        }
    }
    py.detach(|| {
        let began = Instant::now();
        for endpoint in &open {
            // What could not be fenced is told in its handles; nobody is left to hear more.
            let _ = endpoint.close(CLOSE_LIMIT.saturating_sub(began.elapsed()));
        }
        let began = Instant::now();
        while INSIDE.load(Ordering::SeqCst) > 0 && began.elapsed() < LEAVE_LIMIT {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

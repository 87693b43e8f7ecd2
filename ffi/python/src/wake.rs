//! Waking an event loop: handles that end push their key and make a descriptor readable.
//!
//! What runs on the library's threads is a lock for a push and one write: it never needs the interpreter's lock.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

use kvxfer::{Error, ErrorKind};
use parking_lot::Mutex;
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

use crate::error::raise;
use crate::fork::Local;
use crate::handle::{Ended, Handle};

/// Tells an event loop which of the handles it watches have ended.
#[pyclass(frozen, module = "kvxfer._kvxfer", name = "_Wakes")]
pub(crate) struct Wakes {
    inner: Local<Inner>,
}

struct Inner {
    signal: Arc<Signal>,
    /// By key; dropping one forgets its waker.
    watched: Mutex<HashMap<u64, Ended>>,
}

struct Signal {
    fd: OwnedFd,
    ended: Mutex<Vec<u64>>,
}

impl Signal {
    fn push(&self, key: u64) {
        let mut ended = self.ended.lock();
        let first = ended.is_empty();
        ended.push(key);
        if first {
            // Under the lock, so that list and descriptor agree. The counter is 0 or 1: it cannot fail.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }
}

struct KeyWaker {
    signal: Arc<Signal>,
    key: u64,
}

impl Wake for KeyWaker {
    fn wake(self: Arc<Self>) {
        self.signal.push(self.key);
    }
}

#[pymethods]
impl Wakes {
    #[new]
    fn new() -> PyResult<Wakes> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
            raise(
                Error::new(ErrorKind::ResourceExhausted, "eventfd")
                    .because(errno.to_string())
                    .remedy("raise the limit of open files (ulimit -n)"),
            )
        })?;
        Ok(Wakes {
            inner: Local::new(Inner {
                signal: Arc::new(Signal {
                    fd,
                    ended: Mutex::new(Vec::new()),
                }),
                watched: Mutex::default(),
            }),
        })
    }

    /// Readable while keys wait to be taken.
    fn fileno(&self) -> PyResult<i32> {
        Ok(self.inner.get()?.signal.fd.as_raw_fd())
    }

    /// Watches a handle under a key that is not in use.
    fn watch(&self, handle: &Bound<'_, Handle>, key: u64) -> PyResult<()> {
        let inner = self.inner.get()?;
        let mut ended = handle.get().live()?.ended();
        let signal = Arc::clone(&inner.signal);
        let waker = Waker::from(Arc::new(KeyWaker { signal, key }));
        if ended.watch(&mut Context::from_waker(&waker)) {
            inner.signal.push(key);
        }
        inner.watched.lock().insert(key, ended);
        Ok(())
    }

    /// Watches no more. The key may still be among those that wait.
    fn forget(&self, key: u64) -> PyResult<()> {
        let forgotten = self.inner.get()?.watched.lock().remove(&key);
        drop(forgotten);
        Ok(())
    }

    /// Takes the keys of handles that have ended.
    fn take(&self) -> PyResult<Vec<u64>> {
        let signal = &self.inner.get()?.signal;
        let mut ended = signal.ended.lock();
        let keys = std::mem::take(&mut *ended);
        if !keys.is_empty() {
            let mut counter = [0u8; 8];
            let _ = rustix::io::read(&signal.fd, &mut counter);
        }
        Ok(keys)
    }
}

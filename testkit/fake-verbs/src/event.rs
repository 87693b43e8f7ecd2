//! File descriptors that callers wait on: completion channels and asynchronous events.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, Ordering};

use kvxfer_rdma::sys::ibv_async_event;
use parking_lot::{Condvar, Mutex};

use crate::objects::FakeCq;

/// An eventfd: each signal makes one read succeed. It lies in objects that are never freed, so it is closed by hand.
#[derive(Debug)]
pub(crate) struct Signal(AtomicI32);

impl Signal {
    /// A blocking descriptor whose reads take one signal each, as those of the kernel's event files; the caller may
    /// make it non-blocking.
    pub(crate) fn counting() -> io::Result<Signal> {
        Signal::new(libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE)
    }

    /// A non-blocking descriptor whose reads take all signals at once.
    pub(crate) fn doorbell() -> io::Result<Signal> {
        Signal::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)
    }

    fn new(flags: i32) -> io::Result<Signal> {
        // SAFETY: no pointers; the result is checked.
        let fd = unsafe { libc::eventfd(0, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Signal(AtomicI32::new(fd)))
    }

    /// Closes the descriptor; later uses fail with EBADF.
    pub(crate) fn close(&self) {
        let fd = self.0.swap(-1, Ordering::AcqRel);
        if fd >= 0 {
            // SAFETY: ours, and closed once.
            unsafe { libc::close(fd) };
        }
    }

    /// The descriptor, to be waited on.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.load(Ordering::Acquire)
    }

    /// Signals once.
    pub(crate) fn raise(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight readable bytes. It can only fail when 2^64 signals are pending.
        unsafe { libc::write(self.fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Takes a signal, waiting for one if the descriptor blocks.
    pub(crate) fn take(&self) -> io::Result<()> {
        let mut count = [0u8; 8];
        // SAFETY: eight writable bytes.
        let got = unsafe { libc::read(self.fd(), count.as_mut_ptr().cast(), count.len()) };
        if got < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }
}

/// A completion channel: which completion queues have had a completion since they were armed.
pub(crate) struct Channel {
    signal: Signal,
    pending: Mutex<VecDeque<&'static FakeCq>>,
}

impl Channel {
    /// An empty one.
    pub(crate) fn new() -> io::Result<Channel> {
        Ok(Channel {
            signal: Signal::counting()?,
            pending: Mutex::new(VecDeque::new()),
        })
    }

    /// The descriptor.
    pub(crate) fn fd(&self) -> RawFd {
        self.signal.fd()
    }

    /// Closes the descriptor.
    pub(crate) fn close(&self) {
        self.signal.close();
    }

    /// Adds an event of `queue`.
    pub(crate) fn raise(&self, queue: &'static FakeCq) {
        self.pending.lock().push_back(queue);
        self.signal.raise();
    }

    /// The next event, waiting for one if the descriptor blocks.
    pub(crate) fn next(&self) -> io::Result<&'static FakeCq> {
        loop {
            self.signal.take()?;
            // None when the events of a destroyed completion queue were taken out meanwhile.
            if let Some(queue) = self.pending.lock().pop_front() {
                return Ok(queue);
            }
        }
    }

    /// Takes the events of a completion queue out that is being destroyed.
    pub(crate) fn forget(&self, queue: &FakeCq) {
        self.pending.lock().retain(|pending| !std::ptr::eq(*pending, queue));
    }
}

/// The asynchronous events of a context.
pub(crate) struct EventQueue {
    signal: Signal,
    inner: Mutex<Events>,
    acknowledged: Condvar,
}

#[derive(Default)]
struct Events {
    pending: VecDeque<SendEvent>,
    /// Handed out and not acknowledged: the object's address (0 for ports and the device).
    open: Vec<usize>,
}

/// An event on its way; the pointers in it are ours and never freed.
struct SendEvent {
    raw: ibv_async_event,
    object: usize,
}

// SAFETY: the pointers are handles of objects that are never freed and are Sync.
unsafe impl Send for SendEvent {}

impl EventQueue {
    /// An empty one.
    pub(crate) fn new() -> io::Result<EventQueue> {
        Ok(EventQueue {
            signal: Signal::counting()?,
            inner: Mutex::new(Events::default()),
            acknowledged: Condvar::new(),
        })
    }

    /// The descriptor.
    pub(crate) fn fd(&self) -> RawFd {
        self.signal.fd()
    }

    /// Closes the descriptor.
    pub(crate) fn close(&self) {
        self.signal.close();
    }

    /// Adds an event about the object at address `object` (0: a port or the device).
    pub(crate) fn raise(&self, raw: ibv_async_event, object: usize) {
        self.inner.lock().pending.push_back(SendEvent { raw, object });
        self.signal.raise();
    }

    /// The next event, waiting for one if the descriptor blocks.
    pub(crate) fn next(&self) -> io::Result<ibv_async_event> {
        loop {
            self.signal.take()?;
            let mut inner = self.inner.lock();
            if let Some(event) = inner.pending.pop_front() {
                inner.open.push(event.object);
                return Ok(event.raw);
            }
        }
    }

    /// Acknowledges one event about that object; false if there is none.
    pub(crate) fn acknowledge(&self, object: usize) -> bool {
        let mut inner = self.inner.lock();
        let Some(place) = inner.open.iter().position(|open| *open == object) else {
            return false;
        };
        inner.open.swap_remove(place);
        self.acknowledged.notify_all();
        true
    }

    /// Takes the events of an object out that is being destroyed, and waits a while until those that were handed out
    /// are acknowledged; false if they are not.
    pub(crate) fn forget(&self, object: usize) -> bool {
        let mut inner = self.inner.lock();
        inner.pending.retain(|event| event.object != object);
        let limit = std::time::Instant::now() + ACKNOWLEDGE_LIMIT;
        while inner.open.contains(&object) {
            if self.acknowledged.wait_until(&mut inner, limit).timed_out() {
                return false;
            }
        }
        true
    }
}

/// How long destroying an object waits for the acknowledgement of its events before it calls it misuse. The real
/// library waits for ever.
pub(crate) const ACKNOWLEDGE_LIMIT: std::time::Duration = std::time::Duration::from_millis(200);

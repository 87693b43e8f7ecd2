//! The control plane's one timer: a `timerfd` on the same clock as the deadlines.
//!
//! Anybody who holds the control plane's lock may set it earlier; only the control thread waits for it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use kvxfer_core::{Error, ErrorKind, Result, Time};

/// The descriptor, shared by those who set it and the one who waits.
#[derive(Clone)]
pub(crate) struct Timer(Arc<OwnedFd>);

impl Timer {
    pub(crate) fn new() -> Result<Timer> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let fd = timerfd_create(TimerfdClockId::Boottime, flags).map_err(|errno| {
            Error::new(ErrorKind::ResourceExhausted, "timerfd_create")
                .because(errno.to_string())
                .remedy("raise the limit of open files (ulimit -n)")
        })?;
        Ok(Timer(Arc::new(fd)))
    }

    /// Fires at `at`, or at once if that has passed.
    pub(crate) fn set(&self, at: Time) {
        // Zero would disarm it.
        let nanoseconds = at.as_nanos().max(1);
        let value = Itimerspec {
            it_interval: Timespec { tv_sec: 0, tv_nsec: 0 },
            it_value: Timespec {
                tv_sec: i64::try_from(nanoseconds / 1_000_000_000).unwrap_or(i64::MAX),
                tv_nsec: (nanoseconds % 1_000_000_000) as _,
            },
        };
        if let Err(errno) = timerfd_settime(&self.0, TimerfdTimerFlags::ABSTIME, &value) {
            tracing::error!(%errno, "timerfd_settime");
        }
    }

    /// Takes note that it fired.
    pub(crate) fn clear(&self) {
        let mut expirations = [0u8; 8];
        let _ = rustix::io::read(&self.0, &mut expirations);
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Timer {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

//! The clock that deadlines use.

use kvxfer_core::Time;

/// Now. Through libc and not rustix, whose own look at the vDSO fails under valgrind, which counts what posting costs.
pub(crate) fn now() -> Time {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one `timespec`. It cannot fail for a clock that every kernel since 2.6.39 has.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut time) };
    Time::from_nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

//! The clock that deadlines use.

use kvxfer_core::Time;
use rustix::time::{ClockId, clock_gettime};

/// Now.
pub(crate) fn now() -> Time {
    let time = clock_gettime(ClockId::Boottime);
    Time::from_nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

//! The endpoint's clock: `CLOCK_BOOTTIME`, which goes on while a machine sleeps, so that deadlines pass then too.

use rustix::time::{ClockId, clock_gettime};

use kvxfer_core::Time;

/// The time now.
pub(crate) fn now() -> Time {
    let read = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(read.tv_sec).unwrap_or(0);
    let nanoseconds = u64::try_from(read.tv_nsec).unwrap_or(0);
    Time::from_nanos(seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_does_not_go_back() {
        let first = now();
        assert!(now() >= first);
        assert!(first > Time::ZERO);
    }
}

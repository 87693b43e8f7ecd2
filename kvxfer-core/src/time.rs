//! Time as an argument.

use std::ops::{Add, Sub};
use std::time::Duration;

/// A point on the caller's own monotonic clock, in nanoseconds.
///
/// The runtime feeds `CLOCK_BOOTTIME` (which counts suspended time, so that deadlines pass while a machine
/// sleeps); the simulator feeds virtual time. A `Time` never crosses the wire: deadlines travel as remaining
/// milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(u64);

impl Time {
    /// The clock's origin.
    pub const ZERO: Time = Time(0);

    /// A time `nanoseconds` after the clock's origin.
    pub const fn from_nanos(nanoseconds: u64) -> Self {
        Time(nanoseconds)
    }

    /// Nanoseconds since the clock's origin.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// How long after `earlier` this is; zero if it is not after it.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Whole milliseconds from `now` until this time, rounded up; zero once it has passed.
    pub fn remaining_ms(self, now: Time) -> u64 {
        self.0.saturating_sub(now.0).div_ceil(1_000_000)
    }
}

impl Add<Duration> for Time {
    type Output = Time;
    fn add(self, duration: Duration) -> Time {
        Time(
            self.0
                .saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

impl Sub<Duration> for Time {
    type Output = Time;
    fn sub(self, duration: Duration) -> Time {
        Time(
            self.0
                .saturating_sub(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

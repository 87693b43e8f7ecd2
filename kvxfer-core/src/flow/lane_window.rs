//! How much may be in flight on one lane: about two milliseconds at the rate it is measured to have.

use crate::mutants::{self, Mutant};
use crate::time::Time;

/// How much a lane may have in flight, as time at its rate: 2 ms. It hides the round trip of an acknowledgement, and
/// bounds what a small transfer finds ahead of it in the sockets.
const WINDOW_NANOS: u64 = 2_000_000;
/// Shortest time over which a rate is taken: 0.5 ms.
const SAMPLE_NANOS: u64 = 500_000;

/// A lane's window and what is in it.
#[derive(Debug)]
pub(super) struct LaneWindow {
    bytes_min: u64,
    bytes_max: u64,
    chunks_max: u32,
    chunk_bytes_max: u64,
    in_flight_bytes: u64,
    in_flight_chunks: u32,
    // Bytes per second, zero until measured.
    rate: u64,
    sample_start: Time,
    sample_bytes: u64,
}

impl LaneWindow {
    pub(super) fn new(bytes_min: u64, bytes_max: u64, chunks_max: u32, chunk_bytes_max: u64) -> Self {
        LaneWindow {
            bytes_min,
            bytes_max: bytes_max.max(bytes_min),
            chunks_max: chunks_max.max(1),
            chunk_bytes_max,
            in_flight_bytes: 0,
            in_flight_chunks: 0,
            rate: 0,
            sample_start: Time::ZERO,
            sample_bytes: 0,
        }
    }

    /// The window, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        let wanted = u128::from(self.rate) * u128::from(WINDOW_NANOS) / 1_000_000_000;
        u64::try_from(wanted)
            .unwrap_or(u64::MAX)
            .clamp(self.bytes_min, self.bytes_max)
    }

    /// Bytes and chunks in flight.
    pub(super) fn in_flight(&self) -> (u64, u32) {
        (self.in_flight_bytes, self.in_flight_chunks)
    }

    /// Whether one more chunk, of any size, fits. An empty lane takes one whatever its window.
    pub(super) fn is_open(&self) -> bool {
        let fits =
            self.in_flight_bytes + self.chunk_bytes_max <= self.bytes() && self.in_flight_chunks < self.chunks_max;
        self.in_flight_chunks == 0 || fits || mutants::is(Mutant::UnboundedWindow)
    }

    pub(super) fn sent(&mut self, length: u32, now: Time) {
        if self.in_flight_chunks == 0 {
            // Idle time says nothing about the rate.
            self.sample_start = now;
            self.sample_bytes = 0;
        }
        self.in_flight_bytes += u64::from(length);
        self.in_flight_chunks += 1;
    }

    pub(super) fn acknowledged(&mut self, length: u32, now: Time) {
        self.in_flight_bytes = self.in_flight_bytes.saturating_sub(u64::from(length));
        self.in_flight_chunks = self.in_flight_chunks.saturating_sub(1);
        self.sample_bytes += u64::from(length);
        let elapsed = u64::try_from(now.since(self.sample_start).as_nanos()).unwrap_or(u64::MAX);
        if elapsed < SAMPLE_NANOS {
            return;
        }
        let sample = u128::from(self.sample_bytes) * 1_000_000_000 / u128::from(elapsed);
        let sample = u64::try_from(sample).unwrap_or(u64::MAX);
        // Up at once, down slowly: a window that is too small limits the rate that it is measured from.
        self.rate = sample.max((self.rate / 8).saturating_mul(7).saturating_add(sample / 8));
        self.sample_start = now;
        self.sample_bytes = 0;
    }

    /// The lane is gone, and with it what it had in flight.
    pub(super) fn clear(&mut self) {
        self.in_flight_bytes = 0;
        self.in_flight_chunks = 0;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const MIB: u32 = 1 << 20;

    fn window() -> LaneWindow {
        LaneWindow::new(2 << 20, 64 << 20, 256, u64::from(MIB))
    }

    /// Keeps the window full on a lane of this rate for a while; returns the window it ends with.
    fn drive(window: &mut LaneWindow, nanos_per_mib: u64, chunks: u64) -> u64 {
        let mut now = Time::ZERO;
        for _ in 0..chunks {
            while window.is_open() {
                window.sent(MIB, now);
            }
            now = Time::from_nanos(now.as_nanos() + nanos_per_mib);
            window.acknowledged(MIB, now);
        }
        window.bytes()
    }

    #[test]
    fn it_holds_two_milliseconds_at_the_measured_rate() {
        // 100 µs per MiB: 20 MiB in 2 ms.
        let bytes = drive(&mut window(), 100_000, 400);
        assert!((19 << 20..=21 << 20).contains(&bytes), "{bytes}");
    }

    #[test]
    fn it_keeps_its_bounds() {
        assert_eq!(drive(&mut window(), 10_000_000, 50), 2 << 20);
        assert_eq!(drive(&mut window(), 5_000, 4_000), 64 << 20);
    }

    #[test]
    fn small_chunks_are_bounded_by_number() {
        let mut window = window();
        while window.is_open() {
            window.sent(1, Time::ZERO);
        }
        assert_eq!(window.in_flight(), (256, 256));
        window.clear();
        assert!(window.is_open());
    }
}

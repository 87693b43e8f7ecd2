//! Numbers from a seed: session numbers, lane tokens, jitter. Not for keys: whoever needs secrecy seeds it from the
//! system's random source, 128 bits, and the numbers are as hard to guess as the seed only while few are seen.

use std::time::Duration;

/// `splitmix64` over a 128-bit state.
#[derive(Debug)]
pub(super) struct Random {
    high: u64,
    low: u64,
}

impl Random {
    pub(super) fn new(seed: u128) -> Random {
        Random {
            high: (seed >> 64) as u64,
            low: seed as u64,
        }
    }

    pub(super) fn u128(&mut self) -> u128 {
        let high = mix(&mut self.high);
        let low = mix(&mut self.low);
        // Each half depends on both halves of the seed.
        (u128::from(high ^ low.rotate_left(23)) << 64) | u128::from(low ^ high.rotate_left(41))
    }

    /// Between half of `whole` and `whole`.
    pub(super) fn jitter(&mut self, whole: Duration) -> Duration {
        let half = u64::try_from(whole.as_nanos() / 2).unwrap_or(u64::MAX);
        Duration::from_nanos(half + mix(&mut self.low) % half.max(1))
    }
}

fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

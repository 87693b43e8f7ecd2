//! A small seeded generator, so that both processes derive the same scattered blocks from one number.

/// SplitMix64: every seed gives a full-period sequence, and a seed is one `u64` on the control channel.
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// A generator whose sequence is a function of `seed` alone.
    pub fn new(seed: u64) -> Self {
        SplitMix64(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number below `bound` (which is not zero). The bias of the plain remainder is below 2^-32 for the bounds here.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound
    }

    /// The first `take` of a random permutation of `0..of`.
    pub fn permutation(&mut self, of: u32, take: u32) -> Vec<u32> {
        let mut all: Vec<u32> = (0..of).collect();
        let take = take.min(of) as usize;
        for index in 0..take {
            let other = index + self.below((all.len() - index) as u64) as usize;
            all.swap(index, other);
        }
        all.truncate(take);
        all
    }
}

/// SplitMix64's finaliser: a bijection of 64-bit words that spreads every input bit.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_has_distinct_members_in_range() {
        let mut taken = SplitMix64::new(7).permutation(1000, 400);
        assert_eq!(taken.len(), 400);
        assert_ne!(taken, (0..400).collect::<Vec<_>>(), "it must be shuffled");
        taken.sort_unstable();
        taken.dedup();
        assert_eq!(taken.len(), 400);
        assert!(taken.iter().all(|&id| id < 1000));
        assert_eq!(
            SplitMix64::new(7).permutation(1000, 400),
            SplitMix64::new(7).permutation(1000, 400)
        );
    }
}

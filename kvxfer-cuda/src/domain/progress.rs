//! How far a device's copies have come, as it writes it itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::job::{DIRECTIONS, Direction};
use super::pinned::{PinnedBlock, PinnedBytes};
use crate::context::Primary;
use crate::driver::Refused;

/// The number before the first. The device's word soon begins again at zero: in every run, and not only after days.
pub(super) const BEFORE_FIRST: u64 = u32::MAX as u64 - 4;
/// Words of the two directions are on lines of their own.
const WORD_STRIDE: usize = 128;

/// Where a direction's numbers are counted: by the device in a word, and by us where the device cannot.
#[derive(Debug)]
pub(super) struct Progress {
    block: PinnedBlock,
    reached: [Reached; 2],
}

/// The highest number that has been seen: all of its 64 bits, of which the device's word has 32.
///
/// Word and number never are 2^31 apart, so that which is ahead is plain: whoever asks brings the number up to the word, as
/// the thread that hands over does for each hand-over, and what we count is brought into the word.
#[derive(Debug)]
struct Reached(AtomicU64);

impl Progress {
    pub(super) fn new(primary: &Arc<Primary>, pinned: &PinnedBytes) -> Result<Progress, Refused> {
        let progress = Progress {
            block: PinnedBlock::allocate(primary, 2 * WORD_STRIDE, pinned)?,
            reached: DIRECTIONS.map(|_| Reached(AtomicU64::new(BEFORE_FIRST))),
        };
        for direction in DIRECTIONS {
            progress.word(direction).store(BEFORE_FIRST as u32, Ordering::Release);
        }
        Ok(progress)
    }

    /// Whether the hand-over with this number, and so everything before it, has ended.
    pub(super) fn reached(&self, direction: Direction, sequence: u64) -> bool {
        self.reached[direction as usize].is(sequence, self.word(direction))
    }

    /// Counts a hand-over as ended that the device could not count.
    pub(super) fn count(&self, direction: Direction, sequence: u64) {
        self.reached[direction as usize].count(sequence, self.word(direction));
    }

    /// Never frees the words: the device may still write them.
    pub(super) fn keep_memory(&self) {
        self.block.keep();
    }

    /// Where the device writes a direction's number, its lower half.
    pub(super) fn device_word(&self, direction: Direction) -> u64 {
        self.block.device() + (direction as usize * WORD_STRIDE) as u64
    }

    fn word(&self, direction: Direction) -> &AtomicU32 {
        self.block.word(direction as usize * WORD_STRIDE)
    }
}

impl Reached {
    fn is(&self, sequence: u64, word: &AtomicU32) -> bool {
        let seen = self.0.load(Ordering::Acquire);
        // What was seen before the word is no newer than the word.
        let ahead = word.load(Ordering::Acquire).wrapping_sub(seen as u32) as i32;
        let Ok(ahead @ 1..) = u64::try_from(ahead) else {
            return seen >= sequence;
        };
        self.0.fetch_max(seen + ahead, Ordering::AcqRel);
        seen + ahead >= sequence
    }

    fn count(&self, sequence: u64, word: &AtomicU32) {
        self.0.fetch_max(sequence, Ordering::AcqRel);
        // The device may write a later number meanwhile, which must stay.
        let behind = |word: u32| (sequence as u32).wrapping_sub(word) as i32 > 0;
        let _ = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
            behind(word).then_some(sequence as u32)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BILLION: u64 = 1_000_000_000;

    fn at_first() -> (Reached, AtomicU32) {
        (
            Reached(AtomicU64::new(BEFORE_FIRST)),
            AtomicU32::new(BEFORE_FIRST as u32),
        )
    }

    #[test]
    fn numbers_that_a_device_writes_are_reached_in_their_order_for_ever() {
        let (reached, word) = at_first();
        for sequence in (1..20).map(|step| BEFORE_FIRST + step * BILLION) {
            assert!(!reached.is(sequence, &word), "{sequence}");
            word.store(sequence as u32, Ordering::Release);
            assert!(reached.is(sequence, &word), "{sequence}");
            assert!(reached.is(BEFORE_FIRST + 1, &word), "what is long over stays over");
            assert!(!reached.is(sequence + 1, &word), "{sequence}");
        }
    }

    #[test]
    fn numbers_that_we_count_are_too_and_the_device_goes_on_from_there() {
        let (reached, word) = at_first();
        for sequence in (1..20).map(|step| BEFORE_FIRST + step * BILLION) {
            assert!(!reached.is(sequence, &word), "{sequence}");
            reached.count(sequence, &word);
            assert!(reached.is(sequence, &word), "{sequence}");
            assert!(!reached.is(sequence + 1, &word), "{sequence}");
        }
        let last = BEFORE_FIRST + 19 * BILLION;
        word.store((last + 2) as u32, Ordering::Release);
        assert!(reached.is(last + 2, &word) && !reached.is(last + 3, &word));
        // An event is seen after the word of what came behind it.
        reached.count(last + 1, &word);
        assert!(reached.is(last + 2, &word) && !reached.is(last + 3, &word));
    }
}

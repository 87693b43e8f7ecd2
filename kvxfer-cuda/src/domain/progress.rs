//! How far a device's copies have come, as it writes it itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::job::Direction;
use super::pinned::{PinnedBlock, PinnedBytes};
use crate::context::Primary;
use crate::driver::Refused;

/// Where a direction's numbers are counted: by the device in a word, and by us where the device cannot.
#[derive(Debug)]
pub(super) struct Progress {
    block: PinnedBlock,
    counted: [AtomicU32; 2],
}

/// Words of the two directions are on lines of their own.
const WORD_STRIDE: usize = 128;

impl Progress {
    pub(super) fn new(primary: &Arc<Primary>, pinned: &PinnedBytes) -> Result<Progress, Refused> {
        Ok(Progress {
            block: PinnedBlock::allocate(primary, 2 * WORD_STRIDE, pinned)?,
            counted: [AtomicU32::new(0), AtomicU32::new(0)],
        })
    }

    /// Whether the hand-over with this number, and so everything before it, has ended.
    pub(super) fn reached(&self, direction: Direction, sequence: u32) -> bool {
        let at_least = |value: u32| value.wrapping_sub(sequence) as i32 >= 0;
        let word = self.block.word(direction as usize * WORD_STRIDE);
        at_least(word.load(Ordering::Acquire)) || at_least(self.counted[direction as usize].load(Ordering::Acquire))
    }

    /// Counts a hand-over as ended that the device could not count.
    pub(super) fn count(&self, direction: Direction, sequence: u32) {
        self.counted[direction as usize].store(sequence, Ordering::Release);
    }

    /// Never frees the words: the device may still write them.
    pub(super) fn keep_memory(&self) {
        self.block.keep();
    }

    /// Where the device writes a direction's number.
    pub(super) fn device_word(&self, direction: Direction) -> u64 {
        self.block.device() + (direction as usize * WORD_STRIDE) as u64
    }
}

//! What `run` puts into its pools, and how it finds out that the right bytes arrived.
//!
//! Each repetition writes a fresh stamp into every unit of every source block; the destination checks all of them
//! after the initiator was told of completion. After the last repetition every byte of every destination block is
//! checked, and that every byte outside them still holds the poison.

use kvxfer_core::{Error, ErrorKind, Result};

use crate::memory::Memory;
use crate::work::Work;

const WORD_FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
const STAMP_FACTOR: u64 = 0xD6E8_FEB8_6659_FD93;
/// What a destination holds before anything arrives.
pub const POISON: u64 = 0xA5A5_A5A5_A5A5_A5A5;
/// Words handled at a time: they stay in the first-level cache.
const BATCH_WORDS: usize = 2048;

/// Fills the pool with the source pattern: a function of the word's place and the seed.
pub fn fill(memory: &Memory, seed: u64) {
    each_batch(memory, |first, words| {
        for (index, word) in words.iter_mut().enumerate() {
            *word = pattern(first + index as u64, seed);
        }
    });
}

/// Fills the pool with poison.
pub fn poison(memory: &Memory) {
    each_batch(memory, |_, words| words.fill(POISON));
}

/// Writes repetition `epoch`'s stamps into the source blocks.
pub fn stamp(memory: &Memory, work: &Work, epoch: u64) {
    let unit = work.unit_bytes() as u64;
    for offset in units(work, &work.source_offsets()) {
        memory.set_word(offset as usize, stamp_value(offset / unit, epoch));
    }
}

/// Whether all of repetition `epoch`'s stamps are in the destination blocks.
pub fn stamps_are_there(memory: &Memory, work: &Work, epoch: u64) -> bool {
    let unit = work.unit_bytes() as u64;
    let sources = units(work, &work.source_offsets());
    let destinations = units(work, &work.destination_offsets());
    sources
        .into_iter()
        .zip(destinations)
        .all(|(from, to)| memory.word(to as usize) == stamp_value(from / unit, epoch))
}

/// Checks every byte of the destination pool: the moved blocks hold the source's pattern and stamps, all others poison.
///
/// # Errors
/// `Corrupt`, naming the first wrong word, its plane and block, and both values.
pub fn check_everything(memory: &Memory, work: &Work, epoch: u64, source_seed: u64) -> Result<()> {
    let block = work.shape.block_bytes as usize;
    let unit = work.unit_bytes();
    let mut came_from = vec![None; memory.length() / block];
    for (from, to) in work.source_offsets().into_iter().zip(work.destination_offsets()) {
        came_from[to as usize / block] = Some(from);
    }
    let mut words = [0u64; BATCH_WORDS];
    let end = memory.length() / 8;
    let mut first = 0;
    while first < end {
        let block_index = first * 8 / block;
        let block_end = if block_index < came_from.len() {
            (block_index + 1) * block / 8
        } else {
            end
        };
        let count = BATCH_WORDS.min(block_end - first);
        memory.read_words(first * 8, &mut words[..count]);
        let origin = came_from.get(block_index).copied().flatten();
        let into_block = (first * 8 - block_index * block) as u64;
        for (index, &got) in words[..count].iter().enumerate() {
            let want = match origin {
                None => POISON,
                Some(from) => {
                    let at = from + into_block + index as u64 * 8;
                    if (at as usize).is_multiple_of(unit) {
                        stamp_value(at / unit as u64, epoch)
                    } else {
                        pattern(at / 8, source_seed)
                    }
                }
            };
            if got != want {
                return Err(wrong(work, (first + index) * 8, got, want, origin.is_some()));
            }
        }
        first += count;
    }
    Ok(())
}

fn wrong(work: &Work, at: usize, got: u64, want: u64, moved: bool) -> Error {
    let block = at as u64 / work.shape.block_bytes;
    let blocks = u64::from(work.shape.blocks);
    Error::new(
        ErrorKind::Corrupt,
        format!("the word at byte {at} is {got:#018x} instead of {want:#018x}"),
    )
    .at(format!(
        "plane {}, block {}, byte {}",
        block / blocks,
        block % blocks,
        at as u64 % work.shape.block_bytes
    ))
    .because(if moved {
        "the block was to be moved here"
    } else {
        "nothing was to be written outside the destination blocks"
    })
}

fn pattern(word: u64, seed: u64) -> u64 {
    word.wrapping_mul(WORD_FACTOR).wrapping_add(seed)
}

fn stamp_value(unit: u64, epoch: u64) -> u64 {
    unit.wrapping_mul(STAMP_FACTOR) ^ ((epoch + 1) << 40)
}

fn units(work: &Work, offsets: &[u64]) -> Vec<u64> {
    let unit = work.unit_bytes() as u64;
    let per_block = work.shape.block_bytes / unit;
    offsets
        .iter()
        .flat_map(|&offset| (0..per_block).map(move |index| offset + index * unit))
        .collect()
}

fn each_batch(memory: &Memory, mut make: impl FnMut(u64, &mut [u64])) {
    let mut words = [0u64; BATCH_WORDS];
    let total = memory.length() / 8;
    let mut first = 0;
    while first < total {
        let count = BATCH_WORDS.min(total - first);
        make(first as u64, &mut words[..count]);
        memory.write_words(first * 8, &words[..count]);
        first += count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::{Pattern, custom};

    fn moved() -> (std::sync::Arc<Memory>, std::sync::Arc<Memory>, Work) {
        let work = custom(1 << 20, 4096, 40, Pattern::Random).unwrap();
        let (from, to) = (Memory::touched(1 << 20).unwrap(), Memory::touched(1 << 20).unwrap());
        fill(&from, 11);
        poison(&to);
        stamp(&from, &work, 3);
        let mut words = vec![0; 512];
        for (source, destination) in work.source_offsets().into_iter().zip(work.destination_offsets()) {
            from.read_words(source as usize, &mut words);
            to.write_words(destination as usize, &words);
        }
        (from, to, work)
    }

    #[test]
    fn a_right_copy_passes() {
        let (_, to, work) = moved();
        assert!(stamps_are_there(&to, &work, 3));
        check_everything(&to, &work, 3, 11).unwrap();
    }

    #[test]
    fn an_old_repetition_a_wrong_byte_and_a_stray_write_are_caught() {
        let (_, to, work) = moved();
        assert!(!stamps_are_there(&to, &work, 4));
        assert!(check_everything(&to, &work, 4, 11).is_err());
        let inside = work.destination_offsets()[17] as usize + 1000;
        let right = to.word(inside);
        to.set_word(inside, right ^ 1);
        let error = check_everything(&to, &work, 3, 11).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains(&format!("byte {inside} ")), "{error}");
        to.set_word(inside, right);
        let untouched = (0..256).find(|id| !work.destination.contains(id)).unwrap() as usize * 4096;
        to.set_word(untouched, 0);
        let error = check_everything(&to, &work, 3, 11).unwrap_err().to_string();
        assert!(error.contains("outside"), "{error}");
    }
}

//! References: where a chunk's bytes are in the sender's memory, for a receiver on the same host that has mapped it.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::{Error, ErrorKind, Result};

/// Bytes of one run on the wire.
pub const RUN_BYTES: usize = 16;
/// Runs of one reference, at most.
pub const RUNS_MAX: usize = 4096;
/// Bytes of a reference's runs, at most: 64 KiB.
pub const REFERENCE_BYTES_MAX: usize = RUNS_MAX * RUN_BYTES;

/// A run of an exported region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The sender's number of the export.
    pub export: u32,
    /// Bytes, at least one.
    pub length: u32,
    /// First byte, counted from the region's start.
    pub offset: u64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawRun {
    export: U32,
    length: U32,
    offset: U64,
}

const _: () = assert!(size_of::<RawRun>() == RUN_BYTES);

impl Run {
    /// Appends the wire form.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let raw = RawRun {
            export: self.export.into(),
            length: self.length.into(),
            offset: self.offset.into(),
        };
        out.extend_from_slice(raw.as_bytes());
    }

    /// Parses a list of runs that make up `total` bytes.
    ///
    /// # Errors
    /// `Protocol` for an empty run, one whose end overflows, another sum, or a piece of a run.
    pub fn decode_all(bytes: &[u8], total: u32) -> Result<Vec<Run>> {
        let raw =
            <[RawRun]>::ref_from_bytes(bytes).map_err(|_| broken(format!("{} bytes are no list", bytes.len())))?;
        let mut sum = 0u64;
        let mut runs = Vec::with_capacity(raw.len());
        for run in raw {
            let run = Run {
                export: run.export.get(),
                length: run.length.get(),
                offset: run.offset.get(),
            };
            if run.length == 0 || run.offset.checked_add(run.length.into()).is_none() {
                return Err(broken(format!("{run:?} is no run")));
            }
            sum += u64::from(run.length);
            runs.push(run);
        }
        if sum != u64::from(total) {
            return Err(broken(format!("they make up {sum} bytes, and the chunk has {total}")));
        }
        Ok(runs)
    }
}

fn broken(why: String) -> Error {
    Error::new(ErrorKind::Protocol, "a reference's runs")
        .because(why)
        .remedy("the lane is closed; check that both ends are kvxfer, of versions that meet")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_round_trip_and_nonsense_is_refused() {
        let runs =
            [(1, 8, 4096), (7, 16, u64::MAX - 16)].map(|(export, length, offset)| Run { export, length, offset });
        let mut bytes = Vec::new();
        runs.iter().for_each(|run| run.encode(&mut bytes));
        assert_eq!(bytes.len(), 2 * RUN_BYTES);
        assert_eq!(Run::decode_all(&bytes, 24).unwrap(), runs);
        for total in [0, 23, 25] {
            assert_eq!(Run::decode_all(&bytes, total).unwrap_err().kind(), ErrorKind::Protocol);
        }
        assert!(Run::decode_all(&bytes[1..], 24).is_err());
        let bad = [(0u32, 0u64), (2, u64::MAX - 1)];
        for (length, offset) in bad {
            let mut bytes = Vec::new();
            Run {
                export: 0,
                length,
                offset,
            }
            .encode(&mut bytes);
            assert!(Run::decode_all(&bytes, length).is_err(), "{length} at {offset}");
        }
    }
}

//! CRC32C over a header, with its own field taken as zero, and what follows it.

use crc_fast::{CrcAlgorithm, Digest};

/// CRC32C (Castagnoli) of the concatenation.
pub(super) fn crc32c(pieces: &[&[u8]]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    for piece in pieces {
        digest.update(piece);
    }
    // A 32-bit checksum in the low half.
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_castagnoli() {
        // The check value of CRC-32/ISCSI.
        assert_eq!(crc32c(&[b"123456789"]), 0xe306_9283);
        assert_eq!(crc32c(&[b"1234", b"", b"56789"]), 0xe306_9283);
    }
}

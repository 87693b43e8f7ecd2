//! Which way pieces are copied: one decision, made here.
//!
//! A copy engine works through a list of copies at about a microsecond each, whatever their size; a kernel reads its list
//! by itself and has thousands of loads under way, but occupies the device's processors. So the kernel takes what is
//! many and small, and the copy engines the rest.

use crate::config::Gather;

/// The fewest pieces for which a kernel is started.
pub(crate) const KERNEL_PIECES_MIN: usize = 16;
/// The largest mean piece, in bytes, that a kernel copies: above it a copy engine needs longer for the bytes than for the
/// piece.
pub(crate) const KERNEL_PIECE_BYTES_MAX: u64 = 64 << 10;
/// The most pieces of one launch: the length of a descriptor table.
pub(crate) const TABLE_PIECES: usize = 16 << 10;
/// The most copies that one call of the driver's is given.
pub(crate) const BATCH_COPIES_MAX: usize = 8 << 10;

/// How pieces are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// One copy.
    Single,
    /// Copies, many in one call.
    Batch,
    /// Copies, one by one.
    Loop,
    /// A kernel.
    Kernel,
}

/// What is to be copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Shape {
    /// How many pieces.
    pub(crate) pieces: usize,
    /// Their bytes.
    pub(crate) bytes: u64,
}

impl Shape {
    pub(crate) fn and(self, other: Shape) -> Shape {
        Shape {
            pieces: self.pieces + other.pieces,
            bytes: self.bytes + other.bytes,
        }
    }
}

/// What the device and its driver can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Can {
    /// A kernel is loaded.
    pub(crate) kernel: bool,
    /// The driver takes many copies in one call.
    pub(crate) batch: bool,
}

/// Whether one caller's pieces are fit for a kernel: it fits a table, and its pieces are small.
pub(crate) fn fits_kernel(shape: Shape, choice: Gather) -> bool {
    let small = shape.bytes <= KERNEL_PIECE_BYTES_MAX.saturating_mul(shape.pieces as u64);
    match choice {
        Gather::Auto => shape.pieces > 1 && shape.pieces <= TABLE_PIECES && small,
        Gather::Kernel => shape.pieces <= TABLE_PIECES,
        Gather::Batch | Gather::Loop => false,
    }
}

/// How pieces go: `fit` says whether they are fit for a kernel.
pub(crate) fn choose(shape: Shape, fit: bool, can: Can, choice: Gather) -> Way {
    let enough = choice == Gather::Kernel || shape.pieces >= KERNEL_PIECES_MIN;
    match () {
        () if fit && can.kernel && enough => Way::Kernel,
        () if shape.pieces <= 1 => Way::Single,
        () if can.batch && choice != Gather::Loop => Way::Batch,
        () => Way::Loop,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Can = Can {
        kernel: true,
        batch: true,
    };

    fn way(pieces: usize, piece_bytes: u64, can: Can, choice: Gather) -> Way {
        let shape = Shape {
            pieces,
            bytes: pieces as u64 * piece_bytes,
        };
        choose(shape, fits_kernel(shape, choice), can, choice)
    }

    #[test]
    fn many_small_pieces_go_by_kernel_and_large_ones_by_copies() {
        let auto = |pieces, bytes| way(pieces, bytes, ALL, Gather::Auto);
        assert_eq!(auto(512, 8 << 10), Way::Kernel);
        assert_eq!(auto(1, 8 << 10), Way::Single);
        assert_eq!(auto(KERNEL_PIECES_MIN - 1, 8 << 10), Way::Batch);
        assert_eq!(auto(512, KERNEL_PIECE_BYTES_MAX + 1), Way::Batch);
        assert_eq!(auto(TABLE_PIECES + 1, 512), Way::Batch);
    }

    #[test]
    fn what_the_driver_cannot_do_is_done_otherwise() {
        let can = |kernel, batch| way(512, 8 << 10, Can { kernel, batch }, Gather::Auto);
        assert_eq!(can(false, true), Way::Batch);
        assert_eq!(can(false, false), Way::Loop);
        assert_eq!(
            way(
                1,
                8 << 10,
                Can {
                    kernel: false,
                    batch: false
                },
                Gather::Kernel
            ),
            Way::Single
        );
    }

    #[test]
    fn a_setting_decides_what_it_names() {
        assert_eq!(way(2, 1 << 20, ALL, Gather::Kernel), Way::Kernel);
        assert_eq!(way(512, 512, ALL, Gather::Batch), Way::Batch);
        assert_eq!(way(512, 512, ALL, Gather::Loop), Way::Loop);
    }
}

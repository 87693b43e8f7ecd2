//! What is to be copied.

use super::gate::Shape;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// Out of the device.
    Out = 0,
    /// Into it.
    In = 1,
}

pub(super) const DIRECTIONS: [Direction; 2] = [Direction::Out, Direction::In];

/// A piece of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) device: u64,
    /// The host's address.
    pub(crate) staging: u64,
    pub(crate) length: u64,
}

impl Piece {
    /// Where its bytes go, and where they come from.
    pub(super) fn ends(&self, direction: Direction) -> (u64, u64) {
        match direction {
            Direction::Out => (self.staging, self.device),
            Direction::In => (self.device, self.staging),
        }
    }
}

/// What one `start` asked for.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) ticket: u64,
    pub(super) pieces: Vec<Piece>,
    pub(super) shape: Shape,
    /// What makes the device's address of a host's (wrapping); `None`: the staging is not page-locked by us.
    pub(super) device_offset: Option<u64>,
}

impl Job {
    /// Where the device sees the first byte of its staging. Of a job whose staging is page-locked.
    pub(super) fn staging_on_device(&self) -> u64 {
        let first = self.pieces.first().map_or(0, |piece| piece.staging);
        first.wrapping_add(self.device_offset.unwrap_or(0))
    }
}

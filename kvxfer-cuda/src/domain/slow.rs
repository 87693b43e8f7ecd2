//! Bytes in and out at once, for callers and tests: through a page-locked buffer of ours, waited for by polling.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvxfer_core::memory::{CopyState, CopyTicket};
use parking_lot::Mutex;

use super::copier::Copier;
use super::job::{Direction, Piece};
use super::pinned::{PinnedBlock, PinnedBytes};
use crate::context::Primary;
use crate::error::CudaError;

/// The buffer's length.
const BUFFER_BYTES: usize = 256 << 10;
/// How long a copy may take.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// It is looked at after this long, then after twice as long, up to the second value.
const LOOK_AFTER: Duration = Duration::from_micros(20);
const LOOK_EVERY_MAX: Duration = Duration::from_millis(1);

/// The slow path of a device.
#[derive(Debug)]
pub(super) struct Slow {
    primary: Arc<Primary>,
    pinned: PinnedBytes,
    /// One caller at a time.
    buffer: Mutex<Option<PinnedBlock>>,
}

impl Slow {
    pub(super) fn new(primary: &Arc<Primary>, pinned: &PinnedBytes) -> Slow {
        Slow {
            primary: Arc::clone(primary),
            pinned: Arc::clone(pinned),
            buffer: Mutex::new(None),
        }
    }

    pub(super) fn copy_in(&self, copier: &Copier, device: &str, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        let mut to = to;
        for part in bytes.chunks(BUFFER_BYTES) {
            self.with_buffer(device, |buffer| {
                // SAFETY: the part is no longer than the buffer, which nobody else has.
                unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), buffer.host(), part.len()) };
                copy(copier, device, Direction::In, to, buffer, part.len())
            })?;
            to += part.len() as u64;
        }
        Ok(())
    }

    pub(super) fn copy_out(&self, copier: &Copier, device: &str, from: u64, bytes: &mut [u8]) -> Result<(), CudaError> {
        let mut from = from;
        for part in bytes.chunks_mut(BUFFER_BYTES) {
            self.with_buffer(device, |buffer| {
                copy(copier, device, Direction::Out, from, buffer, part.len())?;
                // SAFETY: as above, and the copy into it has ended.
                unsafe { std::ptr::copy_nonoverlapping(buffer.host(), part.as_mut_ptr(), part.len()) };
                Ok(())
            })?;
            from += part.len() as u64;
        }
        Ok(())
    }

    fn with_buffer(
        &self,
        device: &str,
        work: impl FnOnce(&PinnedBlock) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let mut buffer = self.buffer.lock();
        let block = match buffer.take() {
            Some(block) => block,
            None => PinnedBlock::allocate(&self.primary, BUFFER_BYTES, &self.pinned)
                .map_err(|refused| CudaError::call(refused, device))?,
        };
        let result = work(&block);
        match &result {
            // The device may still use it.
            Err(CudaError::Late { .. }) => block.keep(),
            _ => *buffer = Some(block),
        }
        result
    }
}

fn copy(
    copier: &Copier,
    device: &str,
    direction: Direction,
    address: u64,
    buffer: &PinnedBlock,
    length: usize,
) -> Result<(), CudaError> {
    let staging = buffer.host() as u64;
    let offset = buffer.device().wrapping_sub(staging);
    let piece = Piece {
        device: address,
        staging,
        length: length as u64,
    };
    let ticket = copier.start(direction, Some(offset), |pieces| {
        pieces.push(piece);
        Ok::<(), CudaError>(())
    })?;
    wait(copier, device, ticket)
}

fn wait(copier: &Copier, device: &str, ticket: CopyTicket) -> Result<(), CudaError> {
    let deadline = Instant::now() + WAIT_MAX;
    let mut pause = LOOK_AFTER;
    while copier.poll(ticket)? == CopyState::Running {
        if Instant::now() >= deadline {
            return Err(CudaError::Late {
                device: device.to_owned(),
                limit_ms: WAIT_MAX.as_millis() as u64,
            });
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LOOK_EVERY_MAX);
    }
    Ok(())
}

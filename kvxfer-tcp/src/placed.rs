//! Where a chunk's payload goes: the stream of the receiver's own grant, its regions and its gate.

use std::slice;
use std::sync::Arc;

use crc_fast::Digest;
use kvxfer_core::flow::{ByteStream, ChunkHeader, Gate};
use kvxfer_core::memory::staging::Way;
use kvxfer_core::memory::{Region, Segment};
use kvxfer_core::{Error, ErrorKind};

use crate::staging::{CopyJob, StagingBuffer, copy};
use crate::sys;

/// The destination of one chunk's payload.
#[derive(Clone)]
pub(crate) struct Placed {
    pub(crate) stream: Arc<dyn ByteStream>,
    pub(crate) regions: Arc<[Arc<Region>]>,
    pub(crate) gate: Arc<Gate>,
}

impl Placed {
    /// The places of up to `left` bytes from payload byte `from` on, as pieces of a call. Returns the bytes they hold.
    pub(crate) fn pieces(
        &self,
        header: &ChunkHeader,
        from: u32,
        left: u32,
        segments: &mut Vec<Segment>,
        pieces: &mut Vec<libc::iovec>,
    ) -> Result<usize, Error> {
        segments.clear();
        let offset = header.offset + u64::from(from);
        // One piece is kept for the look-ahead.
        let covered = self
            .stream
            .segments(offset, u64::from(left), sys::IOVECS_MAX - 1, segments);
        if covered == 0 || covered > u64::from(left) {
            return Err(short_stream(header));
        }
        for segment in segments.iter() {
            let view = self.regions[segment.region as usize]
                .host_view(segment.offset, segment.length)
                .ok_or_else(|| short_stream(header))?;
            pieces.push(libc::iovec {
                iov_base: view.pointer.cast(),
                iov_len: view.length,
            });
        }
        Ok(covered as usize)
    }
}

/// Starts the copy of `span` of a chunk's payload into its blocks. `None` if the slot is closed.
pub(crate) fn scatter(
    to: &Placed,
    header: &ChunkHeader,
    span: std::ops::Range<u32>,
    buffer: StagingBuffer,
) -> Option<CopyJob> {
    let guard = to.gate.enter_owned()?;
    let mut segments = Vec::new();
    let offset = header.offset + u64::from(span.start);
    to.stream
        .segments(offset, u64::from(span.end - span.start), usize::MAX, &mut segments);
    Some(copy(
        Way::Scatter,
        to.regions.clone(),
        &segments,
        buffer,
        (&to.gate, guard),
    ))
}

/// Copies bytes that were read ahead into place. The caller is inside the gate.
pub(crate) fn copy_into(
    to: &Placed,
    header: &ChunkHeader,
    from: u32,
    mut bytes: &[u8],
    segments: &mut Vec<Segment>,
) -> Result<(), Error> {
    segments.clear();
    let offset = header.offset + u64::from(from);
    let covered = to.stream.segments(offset, bytes.len() as u64, usize::MAX, segments);
    if covered != bytes.len() as u64 {
        return Err(short_stream(header));
    }
    for segment in segments.iter() {
        let view = to.regions[segment.region as usize]
            .host_view(segment.offset, segment.length)
            .ok_or_else(|| short_stream(header))?;
        let (now, later) = bytes.split_at(view.length);
        // SAFETY: the view lies inside a live region, and the look-ahead is another allocation.
        unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), view.pointer, now.len()) };
        bytes = later;
    }
    Ok(())
}

/// Takes the first `length` bytes of the pieces.
///
/// # Safety
/// They must be readable.
pub(crate) unsafe fn digest_pieces(digest: &mut Digest, pieces: &[libc::iovec], mut length: usize) {
    for piece in pieces {
        let take = piece.iov_len.min(length);
        if take == 0 {
            return;
        }
        // SAFETY: inside the piece, which the caller vouches for.
        digest.update(unsafe { slice::from_raw_parts(piece.iov_base.cast::<u8>(), take) });
        length -= take;
    }
}

fn short_stream(header: &ChunkHeader) -> Error {
    Error::new(ErrorKind::Internal, "a stream shorter than the slot table said")
        .because(format!("{header:?}"))
        .remedy("report this")
}

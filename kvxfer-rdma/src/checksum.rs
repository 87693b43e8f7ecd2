//! The opt-in payload checksum: CRC64-NVME over the bytes of a close's chunks, in order.

use std::sync::Arc;

use crc_fast::{CrcAlgorithm, Digest};
use kvxfer_core::flow::ByteStream;
use kvxfer_core::memory::{Region, Segment};

/// Segments looked at at once.
const SEGMENTS_MAX: usize = 256;

/// An empty checksum.
pub(crate) fn new() -> Digest {
    Digest::new(CrcAlgorithm::Crc64Nvme)
}

/// Adds a range of a stream. Memory without a host view is left out, on both sides alike only if both have none: such
/// pools are refused a checksum before.
pub(crate) fn feed<'a>(
    digest: &mut Digest,
    stream: &dyn ByteStream,
    offset: u64,
    length: u32,
    region: impl Fn(u32) -> Option<&'a Arc<Region>>,
) {
    let mut segments: Vec<Segment> = Vec::with_capacity(SEGMENTS_MAX);
    let (mut at, end) = (offset, offset + u64::from(length));
    while at < end {
        segments.clear();
        let got = stream.segments(at, end - at, SEGMENTS_MAX, &mut segments);
        if got == 0 {
            return;
        }
        at += got;
        for segment in &segments {
            let view = region(segment.region).and_then(|region| region.host_view(segment.offset, segment.length));
            if let Some(view) = view {
                // SAFETY: the view is readable memory of this length for as long as the region lives, which the caller
                // holds; a peer may write it meanwhile, which can only make the checksum wrong.
                digest.update(unsafe { std::slice::from_raw_parts(view.pointer, view.length) });
            }
        }
    }
}

//! The bytes that a test sends, and what lies in the places of a stream.

use std::sync::Arc;

use kvxfer_core::flow::ByteStream;
use kvxfer_core::memory::{Region, Segment};

use crate::touch;

/// Bytes that depend on the seed and the place.
pub fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(bytes);
    out
}

/// Writes bytes into a stream's places, in stream order.
///
/// # Panics
/// If there are more bytes than the stream has.
pub fn write_stream(regions: &[Arc<Region>], stream: &dyn ByteStream, bytes: &[u8]) {
    let mut left = bytes;
    for segment in segments(stream, bytes.len() as u64) {
        let (now, later) = left.split_at(segment.length as usize);
        touch::put(&regions[segment.region as usize], segment.offset, now).unwrap();
        left = later;
    }
}

/// Puts the same byte everywhere in a stream.
pub fn paint_stream(regions: &[Arc<Region>], stream: &dyn ByteStream, byte: u8) {
    write_stream(regions, stream, &vec![byte; stream.length() as usize]);
}

/// Reads a stream's bytes, in stream order.
pub fn read_stream(regions: &[Arc<Region>], stream: &dyn ByteStream) -> Vec<u8> {
    let mut bytes = vec![0; stream.length() as usize];
    let mut left = &mut bytes[..];
    for segment in segments(stream, stream.length()) {
        let (now, later) = left.split_at_mut(segment.length as usize);
        touch::get(&regions[segment.region as usize], segment.offset, now).unwrap();
        left = later;
    }
    bytes
}

/// Where the first `length` bytes of a stream are.
fn segments(stream: &dyn ByteStream, length: u64) -> Vec<Segment> {
    let mut segments = Vec::new();
    assert_eq!(stream.segments(0, length, usize::MAX, &mut segments), length);
    segments
}

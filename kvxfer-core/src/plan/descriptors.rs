//! Streams of explicit block descriptors: their bytes in list order.

use crate::error::{Error, ErrorKind, Result};
use crate::flow::ByteStream;
use crate::layout::{BlockDescriptor, PoolLayout};
use crate::memory::Segment;

#[derive(Debug)]
pub(super) struct DescriptorStream {
    /// First byte in the stream, region, offset.
    entries: Vec<(u64, u32, u64)>,
    length: u64,
}

impl DescriptorStream {
    pub(super) fn new(layout: &PoolLayout, descriptors: &[BlockDescriptor]) -> Result<DescriptorStream> {
        let mut stream = DescriptorStream {
            entries: Vec::with_capacity(descriptors.len()),
            length: 0,
        };
        for (index, descriptor) in descriptors.iter().enumerate() {
            let (region, offset) = locate(layout, index, descriptor)?;
            if descriptor.length > 0 {
                stream.entries.push((stream.length, region, offset));
                stream.length += u64::from(descriptor.length);
            }
        }
        Ok(stream)
    }
}

impl ByteStream for DescriptorStream {
    fn length(&self) -> u64 {
        self.length
    }

    fn segments(&self, offset: u64, length: u64, segments_max: usize, out: &mut Vec<Segment>) -> u64 {
        let end = offset.saturating_add(length).min(self.length);
        let mut position = offset;
        let before = out.len();
        let mut entry = self
            .entries
            .partition_point(|entry| entry.0 <= offset)
            .saturating_sub(1);
        while position < end {
            let (start, region, base) = self.entries[entry];
            let entry_end = self.entries.get(entry + 1).map_or(self.length, |next| next.0);
            let segment = Segment {
                region,
                offset: base + (position - start),
                length: entry_end.min(end) - position,
            };
            let full = out.len() >= segments_max;
            match out[before..].last_mut() {
                Some(last) if last.region == region && last.offset + last.length == segment.offset => {
                    last.length += segment.length;
                }
                _ if full => break,
                _ => out.push(segment),
            }
            position += segment.length;
            entry += 1;
        }
        position.saturating_sub(offset)
    }
}

/// Checks that the pieces exist and that none shares a byte with another.
pub(super) fn check(layout: &PoolLayout, descriptors: &[BlockDescriptor]) -> Result<()> {
    let mut places = Vec::with_capacity(descriptors.len());
    for (index, descriptor) in descriptors.iter().enumerate() {
        let (region, offset) = locate(layout, index, descriptor)?;
        if descriptor.length > 0 {
            places.push((region, offset, offset + u64::from(descriptor.length), index));
        }
    }
    places.sort_unstable();
    for pair in places.windows(2) {
        if pair[0].0 == pair[1].0 && pair[1].1 < pair[0].2 {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("descriptors {} and {} overlap", pair[0].3, pair[1].3),
            )
            .at(place(layout, &descriptors[pair[0].3]))
            .because("a byte can be written by one descriptor only")
            .remedy("give each byte once"));
        }
    }
    Ok(())
}

/// Bytes of all descriptors.
pub(super) fn bytes(descriptors: &[BlockDescriptor]) -> u64 {
    descriptors.iter().map(|descriptor| u64::from(descriptor.length)).sum()
}

fn locate(layout: &PoolLayout, index: usize, descriptor: &BlockDescriptor) -> Result<(u32, u64)> {
    let (region, base) = layout
        .plane_offset(descriptor.plane as usize, descriptor.block)
        .map_err(|error| error.at(format!("descriptor {index}")))?;
    let block_length = layout.planes()[descriptor.plane as usize].block_length;
    let end = u64::from(descriptor.offset) + u64::from(descriptor.length);
    if end > block_length {
        return Err(Error::new(
            ErrorKind::OutOfBounds,
            format!(
                "descriptor {index}: {} bytes at offset {}",
                descriptor.length, descriptor.offset
            ),
        )
        .at(place(layout, descriptor))
        .because(format!("a block has {block_length} bytes"))
        .remedy("keep offset plus length inside the block"));
    }
    Ok((region, base + u64::from(descriptor.offset)))
}

fn place(layout: &PoolLayout, descriptor: &BlockDescriptor) -> String {
    format!(
        "{}, block {}",
        layout.plane_place(descriptor.plane as usize),
        descriptor.block
    )
}

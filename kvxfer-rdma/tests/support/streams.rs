//! Byte streams and targets without a planner.

use std::sync::Arc;

use kvxfer_core::Result;
use kvxfer_core::flow::{ByteStream, PartExtent, SlotTarget};
use kvxfer_core::memory::Segment;

/// Equal pieces at given places: what a block list comes to.
#[derive(Debug)]
pub struct Pieces {
    pub region: u32,
    pub offsets: Vec<u64>,
    pub length: u64,
}

impl Pieces {
    pub fn bytes(&self) -> u64 {
        self.offsets.len() as u64 * self.length
    }
}

impl ByteStream for Pieces {
    fn length(&self) -> u64 {
        self.bytes()
    }

    fn segments(&self, offset: u64, length: u64, segments_max: usize, out: &mut Vec<Segment>) -> u64 {
        let end = offset.saturating_add(length).min(self.bytes());
        let mut at = offset;
        while at < end {
            let (index, inside) = ((at / self.length) as usize, at % self.length);
            let step = (self.length - inside).min(end - at);
            let place = self.offsets[index] + inside;
            let full = out.len() == segments_max;
            match out.last_mut() {
                Some(last) if last.region == self.region && last.offset + last.length == place => last.length += step,
                _ if full => break,
                _ => out.push(Segment {
                    region: self.region,
                    offset: place,
                    length: step,
                }),
            }
            at += step;
        }
        at.min(end).saturating_sub(offset)
    }
}

/// Arbitrary segments, over several regions.
#[derive(Debug)]
pub struct Scattered(pub Vec<Segment>);

impl ByteStream for Scattered {
    fn length(&self) -> u64 {
        self.0.iter().map(|segment| segment.length).sum()
    }

    fn segments(&self, offset: u64, length: u64, segments_max: usize, out: &mut Vec<Segment>) -> u64 {
        let (mut skip, mut left) = (offset, length);
        for segment in &self.0 {
            if skip >= segment.length {
                skip -= segment.length;
                continue;
            }
            if left == 0 || out.len() == segments_max {
                break;
            }
            let step = (segment.length - skip).min(left);
            out.push(Segment {
                region: segment.region,
                offset: segment.offset + skip,
                length: step,
            });
            left -= step;
            skip = 0;
        }
        length - left
    }
}

/// A grant of one stream; its parts are token ranges, one token being `bytes_per_token` bytes.
pub struct StreamTarget {
    pub stream: Arc<dyn ByteStream>,
}

impl SlotTarget for StreamTarget {
    fn bytes(&self) -> Result<u64> {
        Ok(self.stream.length())
    }

    fn layers(&self) -> u16 {
        1
    }

    fn stream(&self, extent: PartExtent) -> Result<Arc<dyn ByteStream>> {
        let length = self.stream.length();
        let start = u64::from(extent.token_start).min(length);
        let end = u64::from(extent.token_end).min(length);
        if (start, end) == (0, length) {
            return Ok(self.stream.clone());
        }
        Ok(Arc::new(Window {
            stream: self.stream.clone(),
            start,
            length: end.saturating_sub(start),
        }))
    }
}

/// A part of a stream.
#[derive(Debug)]
pub struct Window {
    pub stream: Arc<dyn ByteStream>,
    pub start: u64,
    pub length: u64,
}

impl ByteStream for Window {
    fn length(&self) -> u64 {
        self.length
    }

    fn segments(&self, offset: u64, length: u64, segments_max: usize, out: &mut Vec<Segment>) -> u64 {
        let length = length.min(self.length.saturating_sub(offset));
        self.stream.segments(self.start + offset, length, segments_max, out)
    }
}

/// A shared stream.
pub type Stream = Arc<dyn ByteStream>;

/// Equal pieces of the first region.
pub fn pieces(offsets: impl IntoIterator<Item = u64>, length: u64) -> Stream {
    Arc::new(Pieces {
        region: 0,
        offsets: offsets.into_iter().collect(),
        length,
    })
}

/// `count` pieces of the first region, in an order that depends on `step`, which has no divisor in common with `count`.
pub fn scattered(count: u64, step: u64, length: u64) -> Stream {
    pieces((0..count).map(|index| index * step % count * length), length)
}

/// One range of the first region.
pub fn range(offset: u64, length: u64) -> Stream {
    pieces([offset], length)
}

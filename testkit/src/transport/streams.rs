//! Byte streams and targets without a planner.

use std::sync::Arc;

use kvxfer_core::Result;
use kvxfer_core::flow::{ByteStream, PartExtent, SlotTarget};
use kvxfer_core::memory::Segment;

/// Equal pieces at given places: what a block list comes to.
#[derive(Debug)]
pub struct Pieces {
    /// Index of their region.
    pub region: u32,
    /// Where each begins, in bytes.
    pub offsets: Vec<u64>,
    /// Bytes of each.
    pub length: u64,
}

impl Pieces {
    /// Bytes of all.
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
pub struct Scattered(
    /// In stream order.
    pub Vec<Segment>,
);

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

/// A grant of one stream; its parts are token ranges, one token being one byte.
pub struct StreamTarget {
    /// The whole of it.
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

/// A token range of a [`StreamTarget`]: a part of a transfer into it.
pub fn tokens(start: u32, end: u32) -> PartExtent {
    PartExtent {
        token_start: start,
        token_end: end,
        layer_start: 0,
        layer_end: 1,
        states: false,
    }
}

/// A part of a stream.
#[derive(Debug)]
pub struct Window {
    /// Of which stream.
    pub stream: Arc<dyn ByteStream>,
    /// Its first byte there.
    pub start: u64,
    /// Bytes of the part.
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

/// Distinct random places for `count` pieces of `length` bytes in `pool` bytes.
pub fn random_pieces(seed: u64, pool: u64, count: usize, length: u64) -> Pieces {
    let slots = (pool / length) as usize;
    assert!(count <= slots);
    let mut order: Vec<u64> = (0..slots as u64).collect();
    let mut state = seed | 1;
    for index in (1..slots).rev() {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        order.swap(index, ((state >> 33) % (index as u64 + 1)) as usize);
    }
    Pieces {
        region: 0,
        offsets: order[..count].iter().map(|slot| slot * length).collect(),
        length,
    }
}

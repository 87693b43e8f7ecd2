//! Nests of strided loops: how one side's bytes of a piece of a block follow each other, and where they go.

use crate::layout::{Axis, BlockId};
use crate::memory::Segment;

/// Number of axes inside a block.
pub(super) const AXES: usize = 4;

/// An axis' place in the arrays indexed by axis.
pub(super) const fn slot(axis: Axis) -> usize {
    match axis {
        Axis::Kv => 0,
        Axis::Head => 1,
        Axis::Token => 2,
        Axis::Dim => 3,
    }
}

/// A plane as a stream reaches it.
#[derive(Debug, Clone, Copy)]
pub(super) struct SidePlane {
    pub(super) plane: u32,
    pub(super) region: u32,
    pub(super) base: u64,
    pub(super) stride: u64,
}

/// Rows of contiguous bytes inside up to four loops, innermost first.
#[derive(Debug, Clone, Copy)]
pub(super) struct Nest {
    pub(super) row: u64,
    pub(super) depth: usize,
    counts: [u64; AXES],
    strides: [u64; AXES],
}

impl Nest {
    /// No loops yet.
    pub(super) const NOTHING: Nest = Nest {
        row: 0,
        depth: 0,
        counts: [1; AXES],
        strides: [0; AXES],
    };

    /// The loops over the axes `order[from..]` with these counts and strides (both by axis slot), merged where one
    /// loop goes on where the next inner one ends.
    pub(super) fn new(
        element: u64,
        order: &[Axis; AXES],
        from: usize,
        counts: &[u64; AXES],
        strides: &[u64; AXES],
    ) -> Nest {
        let mut nest = Nest {
            row: element,
            depth: 0,
            counts: [1; AXES],
            strides: [0; AXES],
        };
        for &axis in order[from..].iter().rev() {
            let (count, stride) = (counts[slot(axis)], strides[slot(axis)]);
            if count == 1 {
                continue;
            }
            if nest.depth == 0 && stride == nest.row {
                nest.row *= count;
                continue;
            }
            let outermost = nest.depth.wrapping_sub(1);
            if nest.depth > 0 && nest.strides[outermost] * nest.counts[outermost] == stride {
                nest.counts[outermost] *= count;
                continue;
            }
            nest.counts[nest.depth] = count;
            nest.strides[nest.depth] = stride;
            nest.depth += 1;
        }
        nest
    }

    /// Gives the rows to `sink`, from byte `skip` of the nest on. False when the sink wants no more.
    #[inline]
    pub(super) fn emit<S: Sink>(&self, side: &SidePlane, base: u64, skip: u64, sink: &mut S) -> bool {
        if self.depth == 0 {
            return sink.put(side, base + skip, self.row - skip);
        }
        let mut index = [0u64; AXES];
        let mut inside = 0;
        if skip > 0 {
            inside = skip % self.row;
            let mut rows = skip / self.row;
            for (index, count) in index.iter_mut().zip(&self.counts[..self.depth]) {
                *index = rows % count;
                rows /= count;
            }
        }
        loop {
            let steps = index.iter().zip(&self.strides[..self.depth]);
            let mut row = base + steps.map(|(index, stride)| index * stride).sum::<u64>();
            let mut rows = self.counts[0] - index[0];
            if inside > 0 {
                if !sink.put(side, row + inside, self.row - inside) {
                    return false;
                }
                inside = 0;
                row += self.strides[0];
                rows -= 1;
            }
            if rows > 0 && !sink.put_rows(side, row, self.strides[0], self.row, rows) {
                return false;
            }
            index[0] = 0;
            let mut level = 1;
            loop {
                if level >= self.depth {
                    return true;
                }
                index[level] += 1;
                if index[level] < self.counts[level] {
                    break;
                }
                index[level] = 0;
                level += 1;
            }
        }
    }
}

/// Takes the pieces of a stream in order. Bounded: it clips the last piece and says when it has enough.
pub(super) trait Sink {
    /// Takes a piece. False when no more is wanted; the piece then counts only as far as what it says it covered.
    fn put(&mut self, side: &SidePlane, offset: u64, length: u64) -> bool;

    /// Takes `count` pieces of `length` bytes, the first at `offset`, then every `stride` bytes. None touches the next.
    #[inline]
    fn put_rows(&mut self, side: &SidePlane, offset: u64, stride: u64, length: u64, count: u64) -> bool {
        (0..count).all(|row| self.put(side, offset + row * stride, length))
    }

    /// Takes one piece of `length` bytes of each block, `offset` bytes into it. `apart` says that no piece touches the
    /// next.
    #[inline]
    fn put_blocks(&mut self, side: &SidePlane, offset: u64, length: u64, blocks: &[BlockId], _apart: bool) -> bool {
        let base = side.base + offset;
        blocks
            .iter()
            .all(|&block| self.put(side, base + u64::from(block) * side.stride, length))
    }
}

/// Collects segments, adjacent ones merged.
pub(super) struct SegmentSink<'a> {
    out: &'a mut Vec<Segment>,
    segments_max: usize,
    /// The segment that may still grow; its length is 0 if there is none.
    last: Segment,
    wanted: u64,
    remaining: u64,
}

impl<'a> SegmentSink<'a> {
    pub(super) fn new(out: &'a mut Vec<Segment>, segments_max: usize, wanted: u64) -> Self {
        SegmentSink {
            // Without room for a segment nothing is wanted.
            remaining: if out.len() < segments_max { wanted } else { 0 },
            wanted: if out.len() < segments_max { wanted } else { 0 },
            out,
            segments_max,
            last: Segment {
                region: 0,
                offset: 0,
                length: 0,
            },
        }
    }

    /// Hands over the last segment: the bytes covered.
    pub(super) fn finish(self) -> u64 {
        if self.last.length > 0 {
            self.out.push(self.last);
        }
        self.wanted - self.remaining
    }

    /// Takes pieces that do not touch each other (the first may touch what came before), all of the same length: the
    /// hot path. `offset_of` says where piece `index` begins; at least one piece is asked for.
    #[inline(always)]
    fn put_apart(&mut self, region: u32, length: u64, count: u64, offset_of: impl Fn(u64) -> u64) -> bool {
        let side = SidePlane {
            plane: 0,
            region,
            base: 0,
            stride: 0,
        };
        // Pieces that fit whole; division only when they do not all.
        let whole = if count * length <= self.remaining {
            count
        } else {
            self.remaining / length
        };
        if whole > 1 {
            if !self.put(&side, offset_of(0), length) || !self.put_away() {
                return false;
            }
            // All but the last at once; the last may still grow.
            let room = (self.segments_max - self.out.len()) as u64;
            let middle = (whole - 2).min(room);
            self.out.extend((1..1 + middle).map(|index| Segment {
                region,
                offset: offset_of(index),
                length,
            }));
            self.remaining -= middle * length;
            if middle == room {
                return false;
            }
        }
        // What is left: the last whole piece, and one that is cut off.
        for index in whole.max(1) - 1..count.min(whole + 1) {
            if !self.put(&side, offset_of(index), length) {
                return false;
            }
        }
        true
    }

    /// Puts the last segment away. False if there is no room for another one then.
    #[inline]
    fn put_away(&mut self) -> bool {
        if self.last.length > 0 {
            self.out.push(self.last);
            self.last.length = 0;
        }
        self.out.len() < self.segments_max
    }
}

impl Sink for SegmentSink<'_> {
    #[inline]
    fn put(&mut self, side: &SidePlane, offset: u64, length: u64) -> bool {
        let length = length.min(self.remaining);
        if self.last.region == side.region && self.last.offset + self.last.length == offset && self.last.length > 0 {
            self.last.length += length;
        } else {
            if !self.put_away() {
                return false;
            }
            self.last = Segment {
                region: side.region,
                offset,
                length,
            };
        }
        self.remaining -= length;
        self.remaining > 0
    }

    #[inline]
    fn put_rows(&mut self, side: &SidePlane, offset: u64, stride: u64, length: u64, count: u64) -> bool {
        self.put_apart(side.region, length, count, |row| offset + row * stride)
    }

    #[inline]
    fn put_blocks(&mut self, side: &SidePlane, offset: u64, length: u64, blocks: &[BlockId], apart: bool) -> bool {
        let base = side.base + offset;
        if blocks.is_empty() {
            return true;
        }
        if apart {
            return self.put_apart(side.region, length, blocks.len() as u64, |index| {
                base + u64::from(blocks[index as usize]) * side.stride
            });
        }
        for &block in blocks {
            if !self.put(side, base + u64::from(block) * side.stride, length) {
                return false;
            }
        }
        true
    }
}

/// A piece of one plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) plane: u32,
    pub(super) region: u32,
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// Collects pieces that do not cross planes.
pub(super) struct PieceSink<'a> {
    pub(super) out: &'a mut Vec<Piece>,
    pub(super) pieces_max: usize,
    pub(super) remaining: u64,
}

impl Sink for PieceSink<'_> {
    fn put(&mut self, side: &SidePlane, offset: u64, length: u64) -> bool {
        let length = length.min(self.remaining);
        let full = self.out.len() >= self.pieces_max;
        match self.out.last_mut() {
            Some(last) if last.plane == side.plane && last.offset + last.length == offset => last.length += length,
            _ if full => return false,
            _ => self.out.push(Piece {
                plane: side.plane,
                region: side.region,
                offset,
                length,
            }),
        }
        self.remaining -= length;
        self.remaining > 0
    }
}

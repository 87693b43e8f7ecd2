//! The two-sided view of a part: strided runs from source planes to destination planes.

use std::fmt;
use std::sync::Arc;

use super::Target;
use super::nest::Piece;
use super::stream::{SelectionStream, Wanted};
use crate::error::{Error, ErrorKind, Result};
use crate::flow::{ByteStream, PartExtent};
use crate::layout::PoolLayout;

/// The copy program of one part: both sides' streams, and the runs between them.
#[derive(Debug, Clone)]
pub struct Plan {
    source: Arc<SelectionStream>,
    destination: Arc<SelectionStream>,
    source_layout: Arc<PoolLayout>,
    destination_layout: Arc<PoolLayout>,
}

/// `count` pieces of `length` bytes each, at constant strides on both sides. Offsets count from the planes' bases (of
/// their blocks 0), strides from one piece to the next; a run of one piece has strides 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The source's plane.
    pub source_plane: u32,
    /// First byte in the source's plane.
    pub source_offset: u64,
    /// From one piece to the next.
    pub source_stride: i64,
    /// The destination's plane.
    pub destination_plane: u32,
    /// First byte in the destination's plane.
    pub destination_offset: u64,
    /// From one piece to the next.
    pub destination_stride: i64,
    /// Bytes of a piece.
    pub length: u64,
    /// Pieces.
    pub count: u64,
    /// First byte in the part's stream.
    pub stream_offset: u64,
}

/// Edges that no run crosses: regions are registered in pieces of at most these many bytes, from their beginnings on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RunLimits {
    /// Largest registration at the source, if registrations are limited.
    pub source_registration_max: Option<u64>,
    /// Largest registration at the destination.
    pub destination_registration_max: Option<u64>,
}

impl Plan {
    /// The plan of a part between two selections.
    ///
    /// # Errors
    /// Those of [`source_stream`](super::source_stream); `InvalidArgument` for descriptors, which have no planes to
    /// match.
    pub fn new(
        source: &Arc<PoolLayout>,
        source_target: &Arc<Target>,
        destination: &Arc<PoolLayout>,
        target: &Arc<Target>,
        extent: PartExtent,
    ) -> Result<Plan> {
        let (
            Target::Selection {
                selection: have,
                scope: source_scope,
            },
            Target::Selection { selection, scope },
        ) = (&**source_target, &**target)
        else {
            return Err(Error::new(ErrorKind::InvalidArgument, "a plan of explicit descriptors")
                .because("runs are made between planes that correspond")
                .remedy("use the streams of both targets"));
        };
        let wanted = Wanted {
            layout: destination,
            selection,
            scope,
            extent,
        };
        Ok(Plan {
            source: Arc::new(SelectionStream::of_source(
                wanted,
                source,
                have,
                source_scope,
                source_target,
            )?),
            destination: Arc::new(SelectionStream::of_destination(wanted, target)?),
            source_layout: source.clone(),
            destination_layout: destination.clone(),
        })
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.destination.length()
    }

    /// The source's segments.
    pub fn source(&self) -> Arc<dyn ByteStream> {
        self.source.clone()
    }

    /// The destination's segments.
    pub fn destination(&self) -> Arc<dyn ByteStream> {
        self.destination.clone()
    }

    /// The runs, in stream order. Iterating allocates nothing per run.
    pub fn runs(&self, limits: RunLimits) -> Runs<'_> {
        let edge = |max: Option<u64>| max.map(|max| max.max(1));
        Runs {
            plan: self,
            source_edge: edge(limits.source_registration_max),
            destination_edge: edge(limits.destination_registration_max),
            plane: 0,
            read: 0,
            source: Pieces::new(),
            destination: Pieces::new(),
            waiting: None,
        }
    }
}

impl fmt::Display for Plan {
    /// The runs as a table, at most 64 of them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const RUNS_MAX: usize = 64;
        let mut more = 0usize;
        for (index, run) in self.runs(RunLimits::default()).enumerate() {
            if index < RUNS_MAX {
                writeln!(
                    f,
                    "{} + {} (stride {}) -> {} + {} (stride {}): {} x {} bytes",
                    self.source_layout.plane_place(run.source_plane as usize),
                    run.source_offset,
                    run.source_stride,
                    self.destination_layout.plane_place(run.destination_plane as usize),
                    run.destination_offset,
                    run.destination_stride,
                    run.count,
                    run.length,
                )?;
            } else {
                more += 1;
            }
        }
        if more > 0 {
            writeln!(f, "… and {more} more runs")?;
        }
        write!(f, "{} bytes", self.bytes())
    }
}

/// Pieces fetched at a time: enough that a fetch costs nothing per piece, small enough to stay in the first cache.
const PIECES_MAX: usize = 256;

/// The runs of a plan, in stream order.
#[derive(Debug)]
pub struct Runs<'a> {
    plan: &'a Plan,
    source_edge: Option<u64>,
    destination_edge: Option<u64>,
    /// The destination plane in progress, as a position in its stream.
    plane: usize,
    /// First byte of the stream not yet in a pair.
    read: u64,
    source: Pieces,
    destination: Pieces,
    /// A piece that did not fit the run before it.
    waiting: Option<PiecePair>,
}

/// Pieces of one side, fetched ahead.
#[derive(Debug)]
struct Pieces {
    fetched: Vec<Piece>,
    next: usize,
    /// Bytes of the next piece already used.
    used: u64,
    /// Where the next fetch reads.
    read: u64,
}

impl Pieces {
    fn new() -> Pieces {
        Pieces {
            fetched: Vec::with_capacity(PIECES_MAX),
            next: 0,
            used: 0,
            read: 0,
        }
    }

    /// What is left of the next piece; fetches up to `end` if none is there.
    fn peek(&mut self, stream: &SelectionStream, end: u64) -> Option<Piece> {
        if self.next == self.fetched.len() {
            self.fetched.clear();
            self.next = 0;
            self.read += stream.pieces(self.read, end - self.read, PIECES_MAX, &mut self.fetched);
        }
        let piece = self.fetched.get(self.next)?;
        Some(Piece {
            offset: piece.offset + self.used,
            length: piece.length - self.used,
            ..*piece
        })
    }

    fn take(&mut self, length: u64) {
        self.used += length;
        if self
            .fetched
            .get(self.next)
            .is_some_and(|piece| piece.length == self.used)
        {
            self.next += 1;
            self.used = 0;
        }
    }
}

/// One contiguous piece on both sides.
#[derive(Debug, Clone, Copy)]
struct PiecePair {
    source: Piece,
    destination: Piece,
    length: u64,
    stream_offset: u64,
}

impl Runs<'_> {
    fn next_pair(&mut self) -> Option<PiecePair> {
        if let Some(pair) = self.waiting.take() {
            return Some(pair);
        }
        loop {
            if self.plane == self.plan.destination.plane_count() {
                return None;
            }
            let (_, _, end) = self.plan.destination.plane_range(self.plane);
            if self.read == end {
                self.plane += 1;
                continue;
            }
            // Both streams have the same length in each plane, so neither runs dry before `end`.
            let source = self.source.peek(&self.plan.source, end)?;
            let destination = self.destination.peek(&self.plan.destination, end)?;
            let length = source
                .length
                .min(destination.length)
                .min(to_edge(source.offset, self.source_edge))
                .min(to_edge(destination.offset, self.destination_edge));
            self.source.take(length);
            self.destination.take(length);
            let stream_offset = self.read;
            self.read += length;
            return Some(PiecePair {
                source,
                destination,
                length,
                stream_offset,
            });
        }
    }

    /// The strides from `last` to `next`, if a run may go on from one to the other.
    fn strides(&self, first: &PiecePair, last: &PiecePair, next: &PiecePair) -> Option<(i64, i64)> {
        let same = next.length == first.length
            && next.source.plane == first.source.plane
            && next.destination.plane == first.destination.plane
            && same_registration(first.source.offset, next.source.offset, self.source_edge)
            && same_registration(first.destination.offset, next.destination.offset, self.destination_edge);
        let stride = |from: u64, to: u64| to.wrapping_sub(from) as i64;
        same.then(|| {
            (
                stride(last.source.offset, next.source.offset),
                stride(last.destination.offset, next.destination.offset),
            )
        })
    }
}

fn to_edge(offset: u64, edge: Option<u64>) -> u64 {
    edge.map_or(u64::MAX, |edge| edge - offset % edge)
}

fn same_registration(a: u64, b: u64, edge: Option<u64>) -> bool {
    edge.is_none_or(|edge| a / edge == b / edge)
}

impl Iterator for Runs<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        let first = self.next_pair()?;
        let source_base = self.plan.source_layout.planes()[first.source.plane as usize].base;
        let destination_base = self.plan.destination_layout.planes()[first.destination.plane as usize].base;
        let mut run = Run {
            source_plane: first.source.plane,
            source_offset: first.source.offset - source_base,
            source_stride: 0,
            destination_plane: first.destination.plane,
            destination_offset: first.destination.offset - destination_base,
            destination_stride: 0,
            length: first.length,
            count: 1,
            stream_offset: first.stream_offset,
        };
        let mut last = first;
        while let Some(next) = self.next_pair() {
            match self.strides(&first, &last, &next) {
                Some((source, destination))
                    if run.count == 1 || (source, destination) == (run.source_stride, run.destination_stride) =>
                {
                    run.source_stride = source;
                    run.destination_stride = destination;
                    run.count += 1;
                    last = next;
                }
                _ => {
                    self.waiting = Some(next);
                    break;
                }
            }
        }
        Some(run)
    }
}

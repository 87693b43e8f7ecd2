//! Reading memory that its owner's devices do not have: the owner copies what is asked for to an *exposure*, which the reader
//! reads, and says so. No fence is needed but the queue pair's end: who reads asks afterwards whether it was still right.

use std::sync::Arc;

use kvxfer_core::flow::{ByteStream, ChunkState, Direction, Gate, LaneName};
use kvxfer_core::memory::staging::Way;
use kvxfer_core::memory::{Region, Segment};
use kvxfer_core::{Error, ErrorKind, Result};

use crate::error::RdmaError;
use crate::memory;
use crate::message::{Landing, LinkMessage, PIECES_MAX, Piece, reason};
use crate::staging::{Buffer, Copying, copy};

use super::Turn;
use super::lane::Lane;
use super::staged::{StagedChunk, StagedStep};

/// Exposures that a peer may have asked for and not given back, per lane: more than a lane has chunks on their way.
const EXPOSURES_MAX: usize = 256;

/// What a peer reads, or wants to read.
pub(super) enum Exposure {
    /// Waits for a buffer.
    Wanted(Vec<Piece>),
    /// Is being copied; perhaps nobody wants it any more.
    Gathering { copy: Copying, wanted: bool },
    /// The peer may read it.
    Shown(Buffer),
}

impl Exposure {
    pub(super) fn is_gathering(&self) -> bool {
        matches!(self, Exposure::Gathering { .. })
    }
}

impl Lane {
    // ------------------------------------------------------------------------------------------------- reading

    /// Asks the peer to expose what staged reads need.
    pub(super) fn ask_for_exposures(&mut self, turn: &Turn<'_>) {
        let lane = self.name();
        let Some(pair) = &mut self.pair else { return };
        let mut index = 0;
        let mut failed = Vec::new();
        while let Some(chunk) = pair.staged.get_mut(index) {
            index += 1;
            if chunk.direction == Direction::Write || !chunk.needs_landing || chunk.exposure.is_some() {
                continue;
            }
            match pieces(chunk) {
                Ok(pieces) => {
                    let number = pair.next_exposure;
                    pair.next_exposure += 1;
                    chunk.exposure = Some(number);
                    self.link.tell(LinkMessage::Expose { lane, number, pieces });
                }
                Err(error) => {
                    index -= 1;
                    failed.extend(pair.staged.remove(index).map(|chunk| (chunk, error)));
                }
            }
        }
        for (chunk, error) in failed {
            self.link.memory_failed(chunk.transfer, error);
            self.give_up_staged(turn, chunk, ChunkState::Missing);
        }
    }

    /// The peer has exposed what a chunk reads.
    pub(super) fn exposed(&mut self, lane: LaneName, exposure: Landing) {
        if lane != self.name() {
            return;
        }
        if let Some(pair) = &mut self.pair {
            let mut chunks = pair.staged.iter_mut();
            // One that was given up meanwhile has said that it is done.
            if let Some(chunk) = chunks.find(|chunk| chunk.exposure == Some(exposure.number)) {
                chunk.landing = Some(exposure);
                self.kicked = true;
            }
        }
    }

    /// The peer cannot expose it.
    pub(super) fn not_exposed(&mut self, turn: &Turn<'_>, lane: LaneName, number: u32, why: &str) {
        if lane != self.name() {
            return;
        }
        let Some(pair) = &mut self.pair else { return };
        let waits = |chunk: &StagedChunk| {
            chunk.exposure == Some(number) && chunk.landing.is_none() && matches!(chunk.step, StagedStep::Waiting)
        };
        let place = pair.staged.iter().position(waits);
        let Some(mut chunk) = place.and_then(|place| pair.staged.remove(place)) else {
            return;
        };
        chunk.exposure = None;
        let error = Error::new(ErrorKind::NotRegistered, "memory that is read")
            .at(format!("rdma, peer {}", self.link.peer.incarnation))
            .because(why.to_owned())
            .remedy("see the owner's log");
        self.link.memory_failed(chunk.transfer, error);
        self.give_up_staged(turn, chunk, ChunkState::Missing);
    }

    /// A read of an exposure has ended.
    pub(super) fn exposure_read(&self, exposure: Option<Landing>) {
        self.exposure_unused(exposure.map(|exposure| exposure.number));
    }

    /// Lets go of an exposure of the peer's, of which no read is under way.
    pub(super) fn exposure_unused(&self, number: Option<u32>) {
        if let Some(number) = number {
            let lane = self.name();
            self.link.tell(LinkMessage::ExposureDone { lane, number });
        }
    }

    // -------------------------------------------------------------------------------------------------- owning

    /// The peer wants to read something.
    pub(super) fn exposure_asked(&mut self, lane: LaneName, number: u32, pieces: Vec<Piece>) {
        if lane != self.name() {
            return;
        }
        let Some(pair) = &mut self.pair else { return };
        let known = pair.exposures.contains_key(&number);
        if known || pair.exposures.len() >= EXPOSURES_MAX {
            let why = format!("it wants exposure {number} twice, or more than {EXPOSURES_MAX} at once");
            self.link.fail(RdmaError::peer(&self.link, why).into());
            return;
        }
        pair.exposures.insert(number, Exposure::Wanted(pieces));
        self.kicked = true;
    }

    /// The peer is done with an exposure.
    pub(super) fn exposure_done(&mut self, lane: LaneName, number: u32) {
        if lane != self.name() {
            return;
        }
        let Some(pair) = &mut self.pair else { return };
        match pair.exposures.get_mut(&number) {
            Some(Exposure::Gathering { wanted, .. }) => *wanted = false,
            Some(_) => drop(pair.exposures.remove(&number)),
            None => {}
        }
        self.kicked = true;
    }

    /// Begins to copy what is wanted, as far as there are buffers.
    pub(super) fn advance_exposures(&mut self, turn: &mut Turn<'_>) {
        let (taker, lane) = (self.taker(), self.name());
        let Some(pair) = &mut self.pair else { return };
        if pair.exposures.is_empty() {
            return;
        }
        let shelf = &turn.staging.exposures;
        let (mut started, mut wants) = (false, false);
        let mut refused = Vec::new();
        for (number, exposure) in &mut pair.exposures {
            let Exposure::Wanted(pieces) = exposure else { continue };
            let buffer = match shelf.take(taker) {
                Ok(Some(buffer)) => buffer,
                Ok(None) => {
                    wants = true;
                    break;
                }
                Err(error) => {
                    self.link.fail(error);
                    break;
                }
            };
            match self.link.gather_served(pieces, buffer) {
                Ok(copy) => {
                    *exposure = Exposure::Gathering { copy, wanted: true };
                    started = true;
                }
                Err(error) => refused.push((*number, error)),
            }
        }
        for (number, error) in refused {
            pair.exposures.remove(&number);
            let why = reason(error.to_string());
            self.link.tell(LinkMessage::NotExposed { lane, number, why });
        }
        if !wants {
            shelf.withdraw(taker);
        }
        if started {
            self.copy_started(turn);
        }
    }

    /// Shows the peer what is copied. True if a copy has ended.
    pub(super) fn poll_exposures(&mut self) -> bool {
        let lane = self.name();
        let Some(pair) = &mut self.pair else { return false };
        let mut ended = Vec::new();
        for (number, exposure) in &mut pair.exposures {
            if let Exposure::Gathering { copy, .. } = exposure {
                ended.extend(copy.poll().map(|result| (*number, result)));
            }
        }
        let any = !ended.is_empty();
        for (number, result) in ended {
            let Some(Exposure::Gathering { copy, wanted }) = pair.exposures.remove(&number) else {
                continue;
            };
            let (buffer, _) = copy.finish();
            match result {
                Ok(()) if wanted => {
                    let exposure = Landing {
                        number,
                        address: buffer.address(),
                        key: buffer.rkey(),
                    };
                    pair.exposures.insert(number, Exposure::Shown(buffer));
                    self.link.tell(LinkMessage::Exposed { lane, exposure });
                }
                Ok(()) => {}
                Err(error) => {
                    let why = reason(error.to_string());
                    self.link.tell(LinkMessage::NotExposed { lane, number, why });
                }
            }
        }
        any
    }

    /// The queue pair is destroyed: the peer reads nothing by it any more, unless that failed.
    pub(super) fn exposures_gone(&mut self, exposures: impl IntoIterator<Item = (u32, Exposure)>, destroyed: bool) {
        if destroyed {
            return;
        }
        for (_, exposure) in exposures {
            if let Exposure::Shown(buffer) = exposure {
                self.quarantined.push((self.epoch, buffer));
            }
        }
    }
}

/// A chunk's bytes at the peer, as the peer knows them.
fn pieces(chunk: &StagedChunk) -> Result<Vec<Piece>> {
    let refused = |why: String| {
        Err(
            Error::new(ErrorKind::Unsupported, "a read of memory that no RDMA device was given")
                .at("rdma")
                .because(why)
                .remedy("have its owner write it, or let another transport do it"),
        )
    };
    let mut segments: Vec<Segment> = Vec::new();
    let header = &chunk.header;
    let got = chunk
        .remote
        .segments(header.offset, header.length.into(), PIECES_MAX, &mut segments);
    if got != u64::from(header.length) {
        return refused(format!("a chunk of it has more than {PIECES_MAX} pieces"));
    }
    let mut pieces = Vec::with_capacity(segments.len());
    for segment in segments {
        let Some(region) = chunk.keys.remote.id(segment.region) else {
            return refused(format!("the peer's pool has no region {}", segment.region));
        };
        pieces.push(Piece {
            region,
            offset: segment.offset,
            length: segment.length as u32,
        });
    }
    Ok(pieces)
}

/// What a peer asked for, as a stream of this side's regions.
#[derive(Debug)]
struct Served(Vec<Segment>);

impl ByteStream for Served {
    fn length(&self) -> u64 {
        self.0.iter().map(|segment| segment.length).sum()
    }

    /// Only ever asked for all of it.
    fn segments(&self, _: u64, length: u64, _: usize, out: &mut Vec<Segment>) -> u64 {
        out.extend_from_slice(&self.0);
        length.min(self.length())
    }
}

impl crate::link::LinkCore {
    /// Begins to copy pieces of pools that serve.
    fn gather_served(&self, pieces: &[Piece], buffer: Buffer) -> Result<Copying> {
        let mut regions: Vec<(u64, Arc<Region>)> = Vec::new();
        let mut segments = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let known = regions.iter().position(|(id, _)| *id == piece.region);
            let index = match known {
                Some(index) => index,
                None => {
                    let keys = self.served(piece.region).ok_or_else(|| {
                        Error::new(ErrorKind::NotRegistered, "a region that is read")
                            .because("no pool in use that serves has it")
                    })?;
                    memory::verify([keys.region()])?;
                    regions.push((piece.region, keys.region().clone()));
                    regions.len() - 1
                }
            };
            regions[index].1.check(piece.offset, piece.length.into())?;
            segments.push(Segment {
                region: index as u32,
                offset: piece.offset,
                length: piece.length.into(),
            });
        }
        let regions = regions.into_iter().map(|(_, region)| region).collect();
        let stream = Served(segments);
        let length = stream.length() as u32;
        // Nobody takes these blocks back from a reader: it asks afterwards whether they were what it meant.
        let guard = Gate::new().enter_owned();
        let guard = guard.ok_or_else(|| Error::new(ErrorKind::Internal, "a new gate that is closed"))?;
        Ok(copy(Way::Gather, regions, (&stream, 0, length), buffer, guard))
    }
}

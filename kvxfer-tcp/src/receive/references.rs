//! References: chunks whose bytes the receiver copies out of the sender's memory by itself.
//!
//! A chunk is begun, copied inside its slot's gate, asked about, and counted once the sender says that its source was still
//! what it had been when the copy was over.

use std::sync::Arc;

use kvxfer_core::flow::{ChunkHeader, ChunkName, ChunkState, Gate, Placement};
use kvxfer_core::memory::staging::StagedCopy;
use kvxfer_core::memory::{Imported, ImportedRun, MemoryDomain};
use kvxfer_core::mutants::{self, Mutant};
use kvxfer_core::transport::LinkEvent;
use kvxfer_core::wire::lane::LaneHeader;
use kvxfer_core::wire::reference::Run;
use kvxfer_core::{Error, ErrorKind};

use super::{Lent, Reader};
use crate::counters::add;
use crate::error::TcpError;
use crate::link::LinkCore;
use crate::placed::Placed;
use crate::staging::copy_imported;

/// Copies out of the peer's memory that a lane has under way, at most: then it reads no further.
const COPIES_MAX: usize = 64;

/// What follows a header and is no chunk's bytes.
pub(super) struct Body {
    of: BodyOf,
    bytes: Vec<u8>,
    length: usize,
}

/// Whose body it is.
pub(super) enum BodyOf {
    /// The description of the export of this number.
    Export(u32),
    /// The runs of a chunk.
    Reference(ChunkHeader),
}

impl Body {
    /// The header's decoder has checked the length, at most 64 KiB.
    pub(super) fn new(of: BodyOf, length: u32) -> Body {
        let length = length as usize;
        Body {
            of,
            bytes: Vec::with_capacity(length),
            length,
        }
    }

    /// Where the rest of it goes, as a piece of a call, and its length.
    pub(super) fn room(&mut self) -> (libc::iovec, usize) {
        let left = self.length - self.bytes.len();
        let spare = self.bytes.spare_capacity_mut();
        let piece = libc::iovec {
            iov_base: spare.as_mut_ptr().cast(),
            iov_len: left,
        };
        (piece, left)
    }

    /// # Safety
    /// So many bytes were written to [`room`](Self::room).
    pub(super) unsafe fn received(&mut self, count: usize) {
        // SAFETY: the caller's contract; the room ends with the capacity.
        unsafe { self.bytes.set_len(self.bytes.len() + count) };
    }
}

/// A lane's references that are not settled.
#[derive(Default)]
pub(super) struct References {
    copying: Vec<(StagedCopy<()>, ChunkHeader)>,
    /// Copied, and the peer is asked whether it counts. As many as a slot lets be placed at once, at most.
    asked: Vec<ChunkHeader>,
    /// The connection is gone: nobody can be asked.
    lost: bool,
}

impl References {
    pub(super) fn copying(&self) -> bool {
        !self.copying.is_empty()
    }

    pub(super) fn have_room(&self) -> bool {
        self.copying.len() < COPIES_MAX
    }

    /// The connection is gone.
    pub(super) fn lose(&mut self, link: &LinkCore) {
        self.lost = true;
        for header in self.asked.drain(..) {
            link.slots.abandon(&header);
        }
    }
}

/// A defect on purpose: see [`Mutant::CountUnasked`] and [`Mutant::CountAfterLoss`].
fn counts_unasked(lost: bool) -> bool {
    mutants::is(Mutant::CountUnasked) || (lost && mutants::is(Mutant::CountAfterLoss))
}

/// How a reference was taken.
enum Taken {
    Copying(StagedCopy<()>),
    /// It cannot be followed: the bytes are wanted.
    Declined,
    /// The slot is closed.
    Refused,
}

impl Reader {
    /// Takes a body's bytes from the look-ahead, and the body if it is whole. False: more has to come.
    pub(super) fn take_body(&mut self, lent: &Lent<'_>) -> Result<bool, TcpError> {
        let Some(body) = &mut self.body else { return Ok(true) };
        let bytes = self.ahead.bytes();
        let taken = bytes.len().min(body.length - body.bytes.len());
        body.bytes.extend_from_slice(&bytes[..taken]);
        self.ahead.consume(taken);
        if body.bytes.len() < body.length || !self.has_room() {
            return Ok(false);
        }
        let Some(body) = self.body.take() else { return Ok(true) };
        match body.of {
            BodyOf::Export(number) => {
                lent.link.imports.described(number, &body.bytes);
                Ok(true)
            }
            BodyOf::Reference(header) => {
                let runs = Run::decode_all(&body.bytes, header.length);
                let runs = runs.map_err(|error| self.peer_error(lent.link, error))?;
                self.follow(lent, header, &runs)?;
                Ok(true)
            }
        }
    }

    /// Begins to copy what a reference is to.
    fn follow(&mut self, lent: &Lent<'_>, header: ChunkHeader, runs: &[Run]) -> Result<(), TcpError> {
        let link = lent.link;
        let placement = link.slots.begin(link.peer.incarnation, &header);
        match placement.map_err(|error| self.peer_error(link, error))? {
            Placement::Scrap(state) => self.answer(link, &header, state),
            Placement::Message => {
                let error = Error::new(ErrorKind::Protocol, "a reference in place of a user message");
                return Err(self.peer_error(link, error));
            }
            Placement::Place { stream, regions, gate } => {
                let to = Placed { stream, regions, gate };
                match self.copy_runs(lent, &header, &to, runs) {
                    Taken::Copying(job) => self.references.copying.push((job, header)),
                    Taken::Declined => {
                        link.slots.abandon(&header);
                        self.decline(&header);
                    }
                    Taken::Refused => {
                        link.slots.abandon(&header);
                        self.answer(link, &header, ChunkState::Refused);
                    }
                }
            }
        }
        Ok(())
    }

    fn copy_runs(&mut self, lent: &Lent<'_>, header: &ChunkHeader, to: &Placed, runs: &[Run]) -> Taken {
        let (offset, length) = (header.offset, u64::from(header.length));
        self.segments.clear();
        let covered = to.stream.segments(offset, length, usize::MAX, &mut self.segments);
        let Some(domain) = self.only_domain(to).filter(|_| covered == length) else {
            return Taken::Declined;
        };
        let mut imports: Vec<(u32, Arc<dyn Imported>)> = Vec::with_capacity(1);
        for run in runs {
            if imports.last().is_some_and(|(number, _)| *number == run.export) {
                continue;
            }
            let Some(import) = lent.link.imports.get(run.export, &domain) else {
                return Taken::Declined;
            };
            imports.push((run.export, import));
        }
        let mut imports = imports.iter().peekable();
        let from: Vec<ImportedRun<'_>> = runs
            .iter()
            .filter_map(|run| {
                while imports.peek().is_some_and(|(number, _)| *number != run.export) {
                    imports.next();
                }
                let (_, region) = imports.peek()?;
                Some(ImportedRun {
                    region,
                    offset: run.offset,
                    length: run.length.into(),
                })
            })
            .collect();
        let gate = match mutants::is(Mutant::ImportWithoutGate) {
            true => Gate::new(),
            false => to.gate.clone(),
        };
        let Some(guard) = gate.enter_owned() else {
            return Taken::Refused;
        };
        let regions = to.regions.clone();
        let job = copy_imported(&from, regions, &self.segments, lent.staging, (&gate, guard));
        Taken::Copying(job)
    }

    /// The domain of all of the segments, if it is one without a host view.
    fn only_domain(&self, to: &Placed) -> Option<Arc<dyn MemoryDomain>> {
        let mut only: Option<&Arc<dyn MemoryDomain>> = None;
        for segment in &self.segments {
            let region = to.regions.get(segment.region as usize)?;
            let domain = region.domain();
            if only.is_none_or(|only| !Arc::ptr_eq(only, domain)) {
                if only.is_some() || region.host_view(0, 1).is_some() {
                    return None;
                }
                only = Some(domain);
            }
        }
        only.cloned()
    }

    /// Looks at copies out of the peer's memory. True if one has ended.
    pub(super) fn poll_references(&mut self, link: &LinkCore) -> bool {
        let mut ended = Vec::new();
        let mut index = 0;
        while let Some((job, _)) = self.references.copying.get_mut(index) {
            match job.poll() {
                None => index += 1,
                Some(outcome) => {
                    let (job, header) = self.references.copying.remove(index);
                    if job.finish().1 {
                        link.emit(LinkEvent::SlotQuiet);
                    }
                    ended.push((header, outcome));
                }
            }
        }
        let moved = !ended.is_empty();
        for (header, outcome) in ended {
            match outcome {
                Ok(()) if counts_unasked(self.references.lost) => {
                    let state = link.slots.placed(&header, true);
                    self.answer(link, &header, state);
                }
                _ if self.references.lost => link.slots.abandon(&header),
                Ok(()) => {
                    self.acks
                        .extend_from_slice(&LaneHeader::Validate(header.name()).encode());
                    self.references.asked.push(header);
                }
                // Whichever of the two memories it was: the bytes find out, and one of them says so.
                Err(error) => {
                    tracing::debug!(%error, "a copy out of a peer's memory failed");
                    link.slots.abandon(&header);
                    self.decline(&header);
                }
            }
        }
        moved
    }

    /// The peer says whether what was copied counts.
    pub(super) fn validated(&mut self, lent: &Lent<'_>, name: ChunkName, counts: bool) -> Result<(), TcpError> {
        let asked = &mut self.references.asked;
        let Some(place) = asked.iter().position(|header| header.name() == name) else {
            let error =
                Error::new(ErrorKind::Protocol, format!("an answer about {name:?}")).because("it was not asked for");
            return Err(self.peer_error(lent.link, error));
        };
        let header = asked.swap_remove(place);
        add(&lent.counters.chunks, 1);
        if counts {
            add(&lent.counters.referred, header.length.into());
        }
        let state = lent.link.slots.placed(&header, counts);
        self.answer(lent.link, &header, state);
        Ok(())
    }

    /// Bytes go into this memory by staging: next time they may not have to.
    pub(super) fn import_for(&mut self, link: &LinkCore, to: &Placed) {
        let mut last: Option<&Arc<dyn MemoryDomain>> = None;
        for region in to.regions.iter() {
            let domain = region.domain();
            let new = last.is_none_or(|last| !Arc::ptr_eq(last, domain));
            if new && region.host_view(0, 1).is_none() {
                link.imports.wanted_in(domain, &mut self.acks);
            }
            last = Some(domain);
        }
    }

    fn decline(&mut self, header: &ChunkHeader) {
        self.acks
            .extend_from_slice(&LaneHeader::Declined(header.name()).encode());
    }
}

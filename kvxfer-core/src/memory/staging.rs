//! Copies between staging buffers and regions as transports make them: inside a gate, polled, and never forgotten.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::{CopyState, CopyTicket, HostView, ImportedRun, MemoryDomain, Region, Segment, StagingPin};
use crate::error::{Error, ErrorKind, Result};
use crate::flow::OwnedGateGuard;
use crate::mutants::{self, Mutant};

/// Which way a copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the regions into the buffer.
    Gather,
    /// From the buffer into the regions.
    Scatter,
}

/// A buffer that copies go through.
///
/// # Safety
/// What [`whole`](Self::whole) gives is memory of the buffer's own, which lives as long as it does and is reached by raw
/// pointers only.
pub unsafe trait CopyBuffer {
    /// All of it.
    fn whole(&self) -> HostView;

    /// Makes it fit for a domain's copies, if it is not yet.
    ///
    /// # Errors
    /// Those of [`MemoryDomain::pin_staging`].
    fn pin(&mut self, domain: &Arc<dyn MemoryDomain>) -> Result<()>;
}

/// What keeps a buffer fit for the copies of domains, each once.
#[derive(Default)]
pub struct Pins(Vec<(Arc<dyn MemoryDomain>, Option<StagingPin>)>);

impl Pins {
    /// Pins the buffer for a domain, if it is not yet.
    ///
    /// # Errors
    /// Those of [`MemoryDomain::pin_staging`].
    ///
    /// # Safety
    /// `whole` is the same each time, and lives until these are dropped or cleared.
    pub unsafe fn pin(&mut self, domain: &Arc<dyn MemoryDomain>, whole: HostView) -> Result<()> {
        if self.0.iter().any(|(pinned, _)| Arc::ptr_eq(pinned, domain)) {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        let pin = unsafe { domain.pin_staging(whole) }?;
        self.0.push((Arc::clone(domain), pin));
        Ok(())
    }

    /// Undoes all of them.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

impl fmt::Debug for Pins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(domain, _)| domain)).finish()
    }
}

/// A copy between a buffer and regions, or out of imported memory (then without a buffer), running by itself inside the gate
/// that it was started with.
///
/// Dropped while it runs (a device that hangs, at the end of its link), it leaks the buffer, the regions and its place inside
/// the gate: the gate then never counts as fenced, which is how the blocks come to be quarantined.
pub struct StagedCopy<B> {
    held: ManuallyDrop<Held<B>>,
    runs: Vec<(Arc<dyn MemoryDomain>, CopyTicket)>,
    failed: Option<Error>,
    taken: bool,
}

struct Held<B> {
    guard: OwnedGateGuard,
    buffer: B,
    _regions: Arc<[Arc<Region>]>,
}

impl<B: CopyBuffer> StagedCopy<B> {
    /// Starts copying the segments from or to the buffer, densely, from the buffer's start. A failure to start is reported
    /// by [`poll`](Self::poll), after what was started has ended.
    pub fn start(
        way: Way,
        regions: Arc<[Arc<Region>]>,
        segments: &[Segment],
        buffer: B,
        guard: OwnedGateGuard,
    ) -> StagedCopy<B> {
        let mut copy = StagedCopy::new(Arc::clone(&regions), buffer, guard);
        copy.failed = copy.start_runs(way, &regions, segments).err();
        copy
    }

    fn start_runs(&mut self, way: Way, regions: &[Arc<Region>], segments: &[Segment]) -> Result<()> {
        let mut at = 0u64;
        for run in segments.chunk_by(|a, b| same_domain(regions, a, b)) {
            let bytes: u64 = run.iter().map(|segment| segment.length).sum();
            let view = self.view(at, bytes)?;
            at += bytes;
            let region = &regions[run[0].region as usize];
            if region.host_view(run[0].offset, run[0].length).is_some() {
                copy_host(way, regions, run, view)?;
                continue;
            }
            let domain = Arc::clone(region.domain());
            self.held.buffer.pin(&domain)?;
            let ticket = match way {
                Way::Gather => domain.start_gather(regions, run, view),
                Way::Scatter => domain.start_scatter(view, regions, run),
            }?;
            self.runs.push((domain, ticket));
        }
        Ok(())
    }

    fn view(&self, offset: u64, length: u64) -> Result<HostView> {
        let whole = self.held.buffer.whole();
        if offset.checked_add(length).is_none_or(|end| end > whole.length as u64) {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("{length} bytes at {offset} of a staging buffer"),
            )
            .because(format!("it has {}", whole.length)));
        }
        Ok(HostView {
            // SAFETY: checked above to stay inside the buffer.
            pointer: unsafe { whole.pointer.add(offset as usize) },
            length: length as usize,
        })
    }
}

impl StagedCopy<()> {
    /// Starts copying runs of imported regions into the segments, which are all of one domain. Failures as in
    /// [`start`](StagedCopy::start).
    pub fn start_import(
        from: &[ImportedRun<'_>],
        regions: Arc<[Arc<Region>]>,
        segments: &[Segment],
        guard: OwnedGateGuard,
    ) -> StagedCopy<()> {
        let mut copy = StagedCopy::new(Arc::clone(&regions), (), guard);
        if let Some(first) = segments.first() {
            let domain = Arc::clone(regions[first.region as usize].domain());
            match domain.start_import_copy(from, &regions, segments) {
                Ok(ticket) => copy.runs.push((domain, ticket)),
                Err(error) => copy.failed = Some(error),
            }
        }
        copy
    }
}

impl<B> StagedCopy<B> {
    fn new(regions: Arc<[Arc<Region>]>, buffer: B, guard: OwnedGateGuard) -> StagedCopy<B> {
        StagedCopy {
            held: ManuallyDrop::new(Held {
                guard,
                buffer,
                _regions: regions,
            }),
            runs: Vec::with_capacity(1),
            failed: None,
            taken: false,
        }
    }

    /// One that was not started, for this reason: [`poll`](Self::poll) says so.
    pub fn refused(error: Error, regions: Arc<[Arc<Region>]>, buffer: B, guard: OwnedGateGuard) -> StagedCopy<B> {
        let mut copy = StagedCopy::new(regions, buffer, guard);
        copy.failed = Some(error);
        copy
    }

    /// Whether it has ended, and if so how.
    pub fn poll(&mut self) -> Option<Result<()>> {
        let failed = &mut self.failed;
        self.runs.retain(|(domain, ticket)| match domain.poll_copy(*ticket) {
            Ok(CopyState::Running) => true,
            Ok(CopyState::Done) => false,
            Err(error) => {
                failed.get_or_insert(error);
                false
            }
        });
        if !self.runs.is_empty() {
            return None;
        }
        Some(self.failed.take().map_or(Ok(()), Err))
    }

    /// A defect on purpose: takes it for ended while it runs.
    pub fn abandon(&mut self) -> Result<()> {
        self.runs.clear();
        Ok(())
    }

    /// After its end: leaves the gate and gives the buffer. True if the gate is fenced by that.
    ///
    /// # Panics
    /// It has not ended.
    pub fn finish(mut self) -> (B, bool) {
        assert!(self.runs.is_empty(), "a copy that has ended");
        self.taken = true;
        // SAFETY: `taken` keeps `drop` from touching `held` again.
        let held = unsafe { ManuallyDrop::take(&mut self.held) };
        let fenced = held.guard.leave();
        (held.buffer, fenced)
    }
}

impl<B> Drop for StagedCopy<B> {
    fn drop(&mut self) {
        if !self.taken && (self.runs.is_empty() || mutants::is(Mutant::ForgetHungCopies)) {
            // SAFETY: not taken, and dropped only here.
            unsafe { ManuallyDrop::drop(&mut self.held) }
        }
    }
}

impl<B> fmt::Debug for StagedCopy<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "StagedCopy({} under way, failed: {:?})",
            self.runs.len(),
            self.failed
        )
    }
}

/// Whether any of these regions must be staged.
pub fn needs_staging(regions: &[Arc<Region>]) -> bool {
    regions.iter().any(|region| region.host_view(0, 1).is_none())
}

fn same_domain(regions: &[Arc<Region>], a: &Segment, b: &Segment) -> bool {
    Arc::ptr_eq(regions[a.region as usize].domain(), regions[b.region as usize].domain())
}

/// Segments of host memory that share a stream with segments that must be staged.
fn copy_host(way: Way, regions: &[Arc<Region>], segments: &[Segment], staging: HostView) -> Result<()> {
    let mut at = staging.pointer;
    for segment in segments {
        let region = &regions[segment.region as usize];
        let view = region.host_view(segment.offset, segment.length).ok_or_else(|| {
            Error::new(ErrorKind::Internal, "a region that has a host view only in part")
                .at(region.domain().name().to_string())
        })?;
        // SAFETY: `view` lies inside a live region, `at` inside the staging buffer (its view was sized for the sum of
        // the segments); the two are different allocations. The caller is inside the gate.
        unsafe {
            match way {
                Way::Gather => std::ptr::copy_nonoverlapping(view.pointer, at, view.length),
                Way::Scatter => std::ptr::copy_nonoverlapping(at, view.pointer, view.length),
            }
            at = at.add(view.length);
        }
    }
    Ok(())
}

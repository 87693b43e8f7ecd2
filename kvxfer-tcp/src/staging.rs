//! Staging: bounded buffers between sockets and memory that the CPU cannot touch, and the copies in and out of it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use kvxfer_core::flow::{Gate, OwnedGateGuard};
use kvxfer_core::memory::{CopyState, CopyTicket, HostView, ImportedRun, MemoryDomain, Region, Segment, StagingPin};
use kvxfer_core::{Error, ErrorKind};
use parking_lot::Mutex;

/// Bytes of a staging buffer: one chunk.
pub(crate) const STAGING_BYTES: usize = kvxfer_core::flow::CHUNK_BYTES_MAX as usize;
/// Buffers are page-locked, which is done to whole pages.
const STAGING_LAYOUT: Layout = match Layout::from_size_align(STAGING_BYTES, 4096) {
    Ok(layout) => layout,
    Err(_) => panic!("a power of two"),
};
/// Transfers whose regions a data thread remembers to have verified, at most; older ones are verified again.
const VERIFIED_MAX: usize = 64;

/// A data thread's staging buffers: allocated at need, kept for reuse, never more than the limit.
pub(crate) struct StagingPool {
    state: Mutex<PoolState>,
    buffers_max: usize,
}

struct PoolState {
    free: Vec<Memory>,
    allocated: usize,
    in_use: usize,
    // Newest last.
    verified: VecDeque<Verified>,
}

/// Regions that were verified for the transfer, or the slot, behind a gate.
struct Verified {
    // Kept, so that no other gate gets its address.
    gate: Weak<Gate>,
    regions: Vec<bool>,
}

/// One allocation, reached through raw pointers only: a device or the kernel may be writing to it.
struct Memory {
    base: NonNull<u8>,
    // For each domain that has copied out of it or into it. Undone before the memory is freed.
    pins: Vec<(Arc<dyn MemoryDomain>, Option<StagingPin>)>,
}

// SAFETY: the allocation is owned by this value alone.
unsafe impl Send for Memory {}

impl Memory {
    fn allocate() -> Memory {
        // SAFETY: the layout's size is not zero.
        let base = unsafe { alloc_zeroed(STAGING_LAYOUT) };
        let base = NonNull::new(base).unwrap_or_else(|| handle_alloc_error(STAGING_LAYOUT));
        Memory { base, pins: Vec::new() }
    }

    fn pin(&mut self, domain: &Arc<dyn MemoryDomain>) -> Result<(), Error> {
        if self.pins.iter().any(|(pinned, _)| Arc::ptr_eq(pinned, domain)) {
            return Ok(());
        }
        let whole = HostView {
            pointer: self.base.as_ptr(),
            length: STAGING_BYTES,
        };
        // SAFETY: the allocation is ours and is freed after its pins.
        let pin = unsafe { domain.pin_staging(whole) }?;
        self.pins.push((domain.clone(), pin));
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.pins.clear();
        // SAFETY: allocated with this layout in `allocate`, and freed only here.
        unsafe { dealloc(self.base.as_ptr(), STAGING_LAYOUT) };
    }
}

impl StagingPool {
    pub(crate) fn new(buffers_max: usize) -> Arc<StagingPool> {
        Arc::new(StagingPool {
            state: Mutex::new(PoolState {
                free: Vec::new(),
                allocated: 0,
                in_use: 0,
                verified: VecDeque::new(),
            }),
            buffers_max,
        })
    }

    /// A buffer, unless all are in use.
    pub(crate) fn take(self: &Arc<Self>) -> Option<StagingBuffer> {
        let mut state = self.state.lock();
        let memory = match state.free.pop() {
            Some(memory) => memory,
            None if state.allocated < self.buffers_max => {
                state.allocated += 1;
                Memory::allocate()
            }
            None => return None,
        };
        state.in_use += 1;
        Some(StagingBuffer {
            memory: ManuallyDrop::new(memory),
            pool: self.clone(),
        })
    }

    /// Verifies the segments' regions, each once for the transfer or slot behind this gate.
    pub(crate) fn verify(&self, gate: &Arc<Gate>, regions: &[Arc<Region>], segments: &[Segment]) -> Result<(), Error> {
        let mut state = self.state.lock();
        let known = |verified: &Verified| std::ptr::eq(verified.gate.as_ptr(), Arc::as_ptr(gate));
        let place = state.verified.iter().rposition(known);
        let place = place.unwrap_or_else(|| {
            if state.verified.len() >= VERIFIED_MAX {
                state.verified.pop_front();
            }
            state.verified.push_back(Verified {
                gate: Arc::downgrade(gate),
                regions: vec![false; regions.len()],
            });
            state.verified.len() - 1
        });
        let verified = &mut state.verified[place].regions;
        verified.resize(verified.len().max(regions.len()), false);
        for segment in segments {
            let index = segment.region as usize;
            if !verified[index] {
                let region = &regions[index];
                region.domain().verify(region)?;
                verified[index] = true;
            }
        }
        Ok(())
    }

    /// Bytes allocated.
    pub(crate) fn bytes(&self) -> usize {
        self.state.lock().allocated * STAGING_BYTES
    }

    /// Buffers in use.
    pub(crate) fn in_use(&self) -> usize {
        self.state.lock().in_use
    }
}

/// A staging buffer; goes back to its pool when dropped.
pub(crate) struct StagingBuffer {
    memory: ManuallyDrop<Memory>,
    pool: Arc<StagingPool>,
}

impl StagingBuffer {
    /// The address of the first byte. Only raw access is made through it, since a device may be copying.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.memory.base.as_ptr()
    }

    fn view(&self, offset: usize, length: usize) -> HostView {
        assert!(offset + length <= STAGING_BYTES, "a view inside the staging buffer");
        HostView {
            // SAFETY: checked above to stay inside the allocation.
            pointer: unsafe { self.pointer().add(offset) },
            length,
        }
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        // SAFETY: `memory` is taken only here, and `self` is not used after it.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        let mut state = self.pool.state.lock();
        state.in_use -= 1;
        state.free.push(memory);
    }
}

/// Which way a copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the segments into staging.
    Gather,
    /// From staging into the segments.
    Scatter,
}

/// A copy between staging and a region, or from imported memory into one, running by itself inside the gate it was started
/// with.
///
/// Dropped while it runs (a hung device at shutdown), it leaks the buffer, the regions and its place inside the gate: the gate then
/// never counts as fenced, which is how the blocks come to be quarantined.
pub(crate) struct CopyJob {
    held: ManuallyDrop<Held>,
    runs: Vec<(Arc<dyn MemoryDomain>, CopyTicket)>,
    failed: Option<Error>,
    taken: bool,
}

struct Held {
    gate: OwnedGateGuard,
    buffer: Option<StagingBuffer>,
    _regions: Arc<[Arc<Region>]>,
}

impl CopyJob {
    /// Starts copying the segments from or to `buffer`, densely, from the buffer's start. A failure to start is
    /// reported by [`poll`](Self::poll), after what was started has ended.
    pub(crate) fn start(
        direction: Direction,
        regions: Arc<[Arc<Region>]>,
        segments: &[Segment],
        mut buffer: StagingBuffer,
        (gate, guard): (&Arc<Gate>, OwnedGateGuard),
    ) -> CopyJob {
        let mut runs = Vec::with_capacity(1);
        let mut failed = buffer.pool.verify(gate, &regions, segments).err();
        let mut offset = 0usize;
        let segments = if failed.is_none() { segments } else { &[] };
        for run in segments.chunk_by(|a, b| same_domain(&regions, a, b)) {
            let bytes: u64 = run.iter().map(|segment| segment.length).sum();
            let view = buffer.view(offset, bytes as usize);
            offset += bytes as usize;
            let region = &regions[run[0].region as usize];
            if region.host_view(run[0].offset, run[0].length).is_some() {
                if let Err(error) = copy_host(direction, &regions, run, view) {
                    failed = Some(error);
                    break;
                }
                continue;
            }
            let domain = region.domain().clone();
            let started = buffer.memory.pin(&domain).and_then(|()| match direction {
                Direction::Gather => domain.start_gather(&regions, run, view),
                Direction::Scatter => domain.start_scatter(view, &regions, run),
            });
            match started {
                Ok(ticket) => runs.push((domain, ticket)),
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        CopyJob::running(guard, Some(buffer), regions, runs, failed)
    }

    /// Starts copying runs of imported regions into the segments, which are all of one domain's. Failures as in
    /// [`start`](Self::start).
    pub(crate) fn start_import(
        from: &[ImportedRun<'_>],
        regions: Arc<[Arc<Region>]>,
        segments: &[Segment],
        staging: &Arc<StagingPool>,
        (gate, guard): (&Arc<Gate>, OwnedGateGuard),
    ) -> CopyJob {
        let started = staging.verify(gate, &regions, segments).and_then(|()| {
            let Some(first) = segments.first() else {
                return Ok(None);
            };
            let domain = regions[first.region as usize].domain().clone();
            let ticket = domain.start_import_copy(from, &regions, segments)?;
            Ok(Some((domain, ticket)))
        });
        let (run, failed) = match started {
            Ok(run) => (run, None),
            Err(error) => (None, Some(error)),
        };
        CopyJob::running(guard, None, regions, run.into_iter().collect(), failed)
    }

    fn running(
        gate: OwnedGateGuard,
        buffer: Option<StagingBuffer>,
        regions: Arc<[Arc<Region>]>,
        runs: Vec<(Arc<dyn MemoryDomain>, CopyTicket)>,
        failed: Option<Error>,
    ) -> CopyJob {
        CopyJob {
            held: ManuallyDrop::new(Held {
                gate,
                buffer,
                _regions: regions,
            }),
            runs,
            failed,
            taken: false,
        }
    }

    /// Whether it has ended, and if so how.
    pub(crate) fn poll(&mut self) -> Option<Result<(), Error>> {
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
        Some(match self.failed.take() {
            Some(error) => Err(error),
            None => Ok(()),
        })
    }

    /// After its end: leaves the gate and gives the buffer back. True if the gate is fenced by that.
    pub(crate) fn finish(mut self) -> (Option<StagingBuffer>, bool) {
        assert!(self.runs.is_empty(), "a copy that has ended");
        self.taken = true;
        // SAFETY: `taken` keeps `drop` from touching `held` again.
        let held = unsafe { ManuallyDrop::take(&mut self.held) };
        let fenced = held.gate.leave();
        (held.buffer, fenced)
    }
}

impl Drop for CopyJob {
    fn drop(&mut self) {
        if !self.taken && self.runs.is_empty() {
            // SAFETY: not taken, and dropped only here.
            unsafe { ManuallyDrop::drop(&mut self.held) }
        }
    }
}

fn same_domain(regions: &[Arc<Region>], a: &Segment, b: &Segment) -> bool {
    Arc::ptr_eq(regions[a.region as usize].domain(), regions[b.region as usize].domain())
}

/// Segments of host memory that share a stream with segments that must be staged.
fn copy_host(
    direction: Direction,
    regions: &[Arc<Region>],
    segments: &[Segment],
    staging: HostView,
) -> Result<(), Error> {
    let mut at = staging.pointer;
    for segment in segments {
        let region = &regions[segment.region as usize];
        let view = region.host_view(segment.offset, segment.length).ok_or_else(|| {
            Error::new(ErrorKind::Internal, "a region that has a host view only in part")
                .at(region.domain().name().to_string())
        })?;
        // SAFETY: `view` lies inside a live region, `at` inside the staging buffer (its view was sized for the sum of
        // the segments); the two are different allocations. We are inside the gate.
        unsafe {
            match direction {
                Direction::Gather => std::ptr::copy_nonoverlapping(view.pointer, at, view.length),
                Direction::Scatter => std::ptr::copy_nonoverlapping(at, view.pointer, view.length),
            }
            at = at.add(view.length);
        }
    }
    Ok(())
}

/// Whether any of these regions must be staged.
pub(crate) fn needs_staging(regions: &[Arc<Region>]) -> bool {
    regions.iter().any(|region| region.host_view(0, 1).is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_bounded_and_come_back() {
        let pool = StagingPool::new(2);
        let first = pool.take().unwrap();
        let _second = pool.take().unwrap();
        assert!(pool.take().is_none());
        drop(first);
        assert!(pool.take().is_some());
        assert_eq!((pool.bytes(), pool.in_use()), (2 * STAGING_BYTES, 1));
    }
}

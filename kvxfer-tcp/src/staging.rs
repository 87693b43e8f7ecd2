//! Staging: bounded buffers between sockets and memory that the CPU cannot touch, and the copies in and out of it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use kvxfer_core::Error;
use kvxfer_core::flow::{Gate, OwnedGateGuard};
use kvxfer_core::memory::staging::{CopyBuffer, Pins, StagedCopy, Way};
use kvxfer_core::memory::{HostView, ImportedRun, MemoryDomain, Region, Segment};
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
    // Undone before the memory is freed.
    pins: Pins,
}

// SAFETY: the allocation is owned by this value alone.
unsafe impl Send for Memory {}

impl Memory {
    fn allocate() -> Memory {
        // SAFETY: the layout's size is not zero.
        let base = unsafe { alloc_zeroed(STAGING_LAYOUT) };
        let base = NonNull::new(base).unwrap_or_else(|| handle_alloc_error(STAGING_LAYOUT));
        Memory {
            base,
            pins: Pins::default(),
        }
    }

    fn whole(&self) -> HostView {
        HostView {
            pointer: self.base.as_ptr(),
            length: STAGING_BYTES,
        }
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
}

// SAFETY: the allocation is the buffer's own and is freed after it has gone back to its pool.
unsafe impl CopyBuffer for StagingBuffer {
    fn whole(&self) -> HostView {
        self.memory.whole()
    }

    fn pin(&mut self, domain: &Arc<dyn MemoryDomain>) -> Result<(), Error> {
        let whole = self.whole();
        // SAFETY: always the whole allocation, which is freed after its pins.
        unsafe { self.memory.pins.pin(domain, whole) }
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

/// A copy through one of these buffers.
pub(crate) type CopyJob = StagedCopy<StagingBuffer>;

/// Starts copying the segments from or to `buffer`, densely, from the buffer's start, inside the gate, which the guard is of.
pub(crate) fn copy(
    way: Way,
    regions: Arc<[Arc<Region>]>,
    segments: &[Segment],
    buffer: StagingBuffer,
    (gate, guard): (&Arc<Gate>, OwnedGateGuard),
) -> CopyJob {
    match buffer.pool.verify(gate, &regions, segments) {
        Ok(()) => StagedCopy::start(way, regions, segments, buffer, guard),
        Err(error) => StagedCopy::refused(error, regions, buffer, guard),
    }
}

/// Starts copying runs of imported regions into the segments, which are all of one domain's, inside the gate.
pub(crate) fn copy_imported(
    from: &[ImportedRun<'_>],
    regions: Arc<[Arc<Region>]>,
    segments: &[Segment],
    staging: &Arc<StagingPool>,
    (gate, guard): (&Arc<Gate>, OwnedGateGuard),
) -> StagedCopy<()> {
    match staging.verify(gate, &regions, segments) {
        Ok(()) => StagedCopy::start_import(from, regions, segments, guard),
        Err(error) => StagedCopy::refused(error, regions, (), guard),
    }
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

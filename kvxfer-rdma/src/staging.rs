//! Staging: bounded buffers that a device has, and the copies between them and memory that it has not.
//!
//! A device has three shelves of buffers of one chunk each: *bounces*, which its own work requests are gathered from or read
//! into, *landings*, which peers write, and *exposures*, which peers read. Each buffer is registered once, for that alone, and
//! pinned once for each domain: what peers may read holds only bytes of pools that serve.
//!
//! # Why nobody waits for ever
//! Two peers that send to each other both need landings of the other and bounces of their own. A chunk that waits for a
//! landing holds no bounce: it takes one only once it has its landing. So whoever holds a bounce has all that it needs, and
//! gives it back when its device and its domain are done. Whoever holds a landing of the peer's waits at most for a bounce,
//! so that each landing is written and closed, or given back, and its owner's domain empties it; nothing of that waits for
//! what the owner itself sends. The same goes for exposures of the peer's, which are read instead of written. If the device
//! or the rail fails, its fence gives all of it back.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::{HashMap, VecDeque};
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use kvxfer_core::flow::{ByteStream, OwnedGateGuard};
use kvxfer_core::memory::staging::{CopyBuffer, Pins, StagedCopy, Way};
use kvxfer_core::memory::{HostView, MemoryDomain, Region, Segment};
use kvxfer_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::error::RdmaError;
use crate::registry::PAGE_BYTES;
use crate::verbs::{Access, MemoryRegion, ProtectionDomain};

/// Bytes of a buffer: one chunk.
pub(crate) const BUFFER_BYTES: usize = kvxfer_core::flow::CHUNK_BYTES_MAX as usize;
const LAYOUT: Layout = match Layout::from_size_align(BUFFER_BYTES, PAGE_BYTES as usize) {
    Ok(layout) => layout,
    Err(_) => panic!("a power of two"),
};

/// Who takes buffers: a link's rail.
pub(crate) type Taker = (u64, u16);

/// A device's buffers. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Staging {
    pub(crate) bounces: Arc<Shelf>,
    pub(crate) landings: Arc<Shelf>,
    pub(crate) exposures: Arc<Shelf>,
}

/// What peers may do with a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Peers {
    Nothing,
    Write,
    Read,
}

impl Staging {
    /// At most so many bytes: half of them for peers to write, a quarter to send from, and a quarter for peers to read.
    pub(crate) fn new(domain: &ProtectionDomain, bytes_max: u64) -> Staging {
        let buffers = usize::try_from(bytes_max).unwrap_or(usize::MAX) / BUFFER_BYTES;
        let quarter = (buffers / 4).max(1);
        let half = buffers.saturating_sub(2 * quarter).max(1);
        Staging {
            bounces: Shelf::new(domain, quarter, Peers::Nothing),
            landings: Shelf::new(domain, half, Peers::Write),
            exposures: Shelf::new(domain, quarter, Peers::Read),
        }
    }

    fn shelves(&self) -> [&Arc<Shelf>; 3] {
        [&self.bounces, &self.landings, &self.exposures]
    }

    /// Wants nothing any more.
    pub(crate) fn withdraw(&self, who: Taker) {
        for shelf in self.shelves() {
            shelf.withdraw(who);
        }
    }

    /// Those who wait and whose turn it is, where there is something to be had.
    pub(crate) fn served_next(&self) -> impl Iterator<Item = Taker> {
        self.shelves().map(|shelf| shelf.served_next()).into_iter().flatten()
    }

    /// Bytes of all buffers that were made.
    pub(crate) fn bytes(&self) -> usize {
        self.shelves().map(|shelf| shelf.made()).iter().sum::<usize>() * BUFFER_BYTES
    }

    /// Buffers in use.
    pub(crate) fn in_use(&self) -> usize {
        self.shelves().map(|shelf| shelf.in_use()).iter().sum()
    }
}

/// Buffers of one kind: made at need, kept for reuse, never more than the limit; given out first come, first served.
pub(crate) struct Shelf {
    domain: ProtectionDomain,
    buffers_max: usize,
    peers: Peers,
    state: Mutex<ShelfState>,
}

#[derive(Default)]
struct ShelfState {
    free: Vec<Memory>,
    made: usize,
    in_use: usize,
    held: HashMap<Taker, usize>,
    waiting: VecDeque<Taker>,
    /// What a loopback read reads to flush the writes of peers, for each buffer ever made.
    flush_points: Vec<(u64, u32)>,
    /// The device or the system gives no more.
    full: bool,
}

impl Shelf {
    fn new(domain: &ProtectionDomain, buffers_max: usize, peers: Peers) -> Arc<Shelf> {
        Arc::new(Shelf {
            domain: domain.clone(),
            buffers_max,
            peers,
            state: Mutex::default(),
        })
    }

    pub(crate) fn made(&self) -> usize {
        self.state.lock().made
    }

    pub(crate) fn in_use(&self) -> usize {
        self.state.lock().in_use
    }

    /// A buffer, if there is one and nobody has waited longer; else the taker waits in line until it
    /// [withdraws](Self::withdraw).
    ///
    /// Whoever has some gets one more only while it has less than there are left. So one that keeps what it has (a peer
    /// that is slow, or gone) leaves as many to others, who then share what they leave to each other.
    ///
    /// # Errors
    /// What the device or the system refuses, if there is no buffer at all.
    pub(crate) fn take(self: &Arc<Self>, who: Taker) -> Result<Option<Buffer>> {
        let mut state = self.state.lock();
        let held = state.held.get(&who).copied().unwrap_or(0);
        if held > 0 && held >= self.available(&state) {
            return Ok(None);
        }
        let first = state.waiting.front().is_none_or(|first| *first == who);
        let memory = match first {
            true => self.memory(&mut state)?,
            false => None,
        };
        let Some(memory) = memory else {
            if !state.waiting.contains(&who) {
                state.waiting.push_back(who);
            }
            return Ok(None);
        };
        if state.waiting.front() == Some(&who) {
            state.waiting.pop_front();
        }
        state.in_use += 1;
        *state.held.entry(who).or_default() += 1;
        Ok(Some(Buffer {
            memory: ManuallyDrop::new(memory),
            shelf: self.clone(),
            taker: who,
        }))
    }

    /// Buffers that are free, or could be made.
    fn available(&self, state: &ShelfState) -> usize {
        let unmade = if state.full { 0 } else { self.buffers_max - state.made };
        state.free.len() + unmade
    }

    fn memory(&self, state: &mut ShelfState) -> Result<Option<Memory>> {
        if let Some(memory) = state.free.pop() {
            return Ok(Some(memory));
        }
        if self.available(state) == 0 {
            return Ok(None);
        }
        match Memory::new(&self.domain, self.peers) {
            Ok(memory) => {
                state.made += 1;
                state.flush_points.extend(memory.flush_point());
                Ok(Some(memory))
            }
            Err(error) if state.made == 0 => Err(error),
            Err(error) => {
                tracing::warn!(%error, buffers = state.made, "fewer staging buffers than configured");
                state.full = true;
                Ok(None)
            }
        }
    }

    /// Does not wait any more.
    pub(crate) fn withdraw(&self, who: Taker) {
        let mut state = self.state.lock();
        if !state.waiting.is_empty() {
            state.waiting.retain(|other| *other != who);
        }
    }

    fn served_next(&self) -> Option<Taker> {
        let state = self.state.lock();
        state.waiting.front().copied().filter(|_| self.available(&state) > 0)
    }

    /// What is read to flush the writes of peers to all buffers.
    pub(crate) fn flush_points(&self) -> Vec<(u64, u32)> {
        self.state.lock().flush_points.clone()
    }
}

/// One allocation, reached through raw pointers only: a device may be writing it.
struct Memory {
    // In this order: nothing reaches the memory any more when it is freed.
    region: Option<MemoryRegion>,
    flush: Option<MemoryRegion>,
    pins: Pins,
    base: NonNull<u8>,
}

// SAFETY: the allocation is owned by this value alone.
unsafe impl Send for Memory {}

impl Memory {
    fn new(domain: &ProtectionDomain, peers: Peers) -> Result<Memory> {
        // SAFETY: the layout's size is not zero.
        let base = unsafe { alloc_zeroed(LAYOUT) };
        let base = NonNull::new(base).ok_or_else(|| {
            Error::new(
                ErrorKind::ResourceExhausted,
                format!("{BUFFER_BYTES} bytes for staging"),
            )
            .because("the system refused the allocation")
            .remedy("free memory, or lower rdma.staging_bytes_max")
        })?;
        // Freed with it, whatever is refused below.
        let mut memory = Memory {
            region: None,
            flush: None,
            pins: Pins::default(),
            base,
        };
        let verbs = |error| Error::from(RdmaError::Verbs(error));
        let address = memory.address();
        let written = Access {
            local_write: true,
            remote_write: peers == Peers::Write,
            remote_read: peers == Peers::Read,
            ..Access::default()
        };
        // SAFETY: the allocation is ours, and is freed after its registrations; nobody holds references into it.
        memory.region = Some(unsafe { domain.register(address, BUFFER_BYTES as u64, written) }.map_err(verbs)?);
        if peers == Peers::Write {
            // Peers must not read what others have written: the flush has a key of its own.
            let read = Access {
                remote_read: true,
                ..Access::default()
            };
            // SAFETY: as above.
            memory.flush = Some(unsafe { domain.register(address, PAGE_BYTES, read) }.map_err(verbs)?);
        }
        Ok(memory)
    }

    fn address(&self) -> u64 {
        self.base.as_ptr().expose_provenance() as u64
    }

    fn flush_point(&self) -> Option<(u64, u32)> {
        self.flush.as_ref().map(|flush| (self.address(), flush.rkey()))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.region = None;
        self.flush = None;
        self.pins.clear();
        // SAFETY: allocated with this layout in `new`, freed only here, and no longer registered or pinned.
        unsafe { dealloc(self.base.as_ptr(), LAYOUT) };
    }
}

/// A buffer in use; goes back to its shelf when dropped.
pub(crate) struct Buffer {
    memory: ManuallyDrop<Memory>,
    shelf: Arc<Shelf>,
    taker: Taker,
}

impl Buffer {
    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// For our own work requests.
    pub(crate) fn lkey(&self) -> u32 {
        self.memory.region.as_ref().map_or(0, MemoryRegion::lkey)
    }

    /// For peers.
    pub(crate) fn rkey(&self) -> u32 {
        self.memory.region.as_ref().map_or(0, MemoryRegion::rkey)
    }

    /// Adds its first `length` bytes to a checksum.
    pub(crate) fn feed(&self, digest: &mut crc_fast::Digest, length: u32) {
        let length = (length as usize).min(BUFFER_BYTES);
        // SAFETY: inside the allocation. No copy writes it now, and no honest peer: a dishonest one can only make the
        // checksum wrong.
        digest.update(unsafe { std::slice::from_raw_parts(self.memory.base.as_ptr(), length) });
    }

    /// Never gives it back: something may still write it.
    pub(crate) fn quarantine(self) {
        std::mem::forget(self);
    }
}

// SAFETY: the allocation is the buffer's own and is freed after it has gone back to its shelf.
unsafe impl CopyBuffer for Buffer {
    fn whole(&self) -> HostView {
        HostView {
            pointer: self.memory.base.as_ptr(),
            length: BUFFER_BYTES,
        }
    }

    fn pin(&mut self, domain: &Arc<dyn MemoryDomain>) -> Result<()> {
        let whole = self.whole();
        // SAFETY: always the whole allocation, which is freed after its pins.
        unsafe { self.memory.pins.pin(domain, whole) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: `memory` is taken only here, and `self` is not used after it.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        let mut state = self.shelf.state.lock();
        state.in_use -= 1;
        if let Some(held) = state.held.get_mut(&self.taker) {
            *held -= 1;
            if *held == 0 {
                state.held.remove(&self.taker);
            }
        }
        state.free.push(memory);
    }
}

/// A copy between one of these buffers and regions.
pub(crate) type Copying = StagedCopy<Buffer>;

/// Starts copying a range of a stream from or to the buffer, densely, from the buffer's start, inside the guard's gate.
pub(crate) fn copy(
    way: Way,
    regions: Arc<[Arc<Region>]>,
    (stream, offset, length): (&dyn ByteStream, u64, u32),
    buffer: Buffer,
    guard: OwnedGateGuard,
) -> Copying {
    let mut segments: Vec<Segment> = Vec::new();
    let got = stream.segments(offset, length.into(), usize::MAX, &mut segments);
    if got != u64::from(length) {
        let error = Error::new(ErrorKind::Internal, "a chunk that its stream does not have").at("rdma");
        return StagedCopy::refused(error, regions, buffer, guard);
    }
    StagedCopy::start(way, regions, &segments, buffer, guard)
}

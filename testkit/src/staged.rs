//! Memory without a host view, so that transports are right for device memory before there is any.
//!
//! A region of [`StagedMemory`] has an address, but no byte can be read or written there: the address range is
//! mapped without access, and a transport that touches it dies at once. Bytes move only through the domain's copies,
//! which run on a thread of their own, late and out of order, as a device's do. The domain watches how staging
//! buffers are used and keeps a list of [violations](StagedMemory::violations).

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvxfer_core::memory::{
    CopyState, CopyTicket, Exported, HostView, Imported, ImportedRun, MemoryDomain, Region, Segment, StagingPin,
};
use kvxfer_core::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::rng::Rng;

mod job;
mod sharing;

use job::{AddressRange, From, Job, Piece, Staging, Storage, UNFINISHED, Way, checksum};
pub use sharing::Sharing;

/// A memory domain whose regions the CPU cannot touch.
#[derive(Debug)]
pub struct StagedMemory {
    shared: Arc<Shared>,
    copier: Mutex<Option<JoinHandle<()>>>,
    sharing: Sharing,
}

impl StagedMemory {
    /// A domain whose copies take up to `delay_max` longer than they must. The delays follow from the seed.
    ///
    /// # Errors
    /// `ResourceExhausted` if the system gives no thread.
    pub fn new(delay_max: Duration, seed: u64) -> Result<Arc<StagedMemory>> {
        let shared = Arc::new(Shared {
            delay_max,
            state: Mutex::new(State {
                storages: HashMap::new(),
                pending: Vec::new(),
                tickets: HashMap::new(),
                violations: Vec::new(),
                pinned: Vec::new(),
                replaced: HashSet::new(),
                verified: 0,
                copies_to_fail: 0,
                hung: false,
                failed: HashSet::new(),
                copies_done: 0,
                rng: Rng::new(seed),
                next_ticket: 1,
                closing: false,
            }),
            changed: Condvar::new(),
        });
        let worker = Arc::clone(&shared);
        let copier = std::thread::Builder::new()
            .name("staged-copies".into())
            .spawn(move || worker.run())
            .map_err(|error| {
                Error::new(ErrorKind::ResourceExhausted, "the thread for staged copies").because(error.to_string())
            })?;
        Ok(Arc::new(StagedMemory {
            shared,
            copier: Mutex::new(Some(copier)),
            sharing: Sharing::default(),
        }))
    }

    /// A zeroed region in this domain.
    ///
    /// # Errors
    /// `InvalidArgument` for a zero length, `ResourceExhausted` if the system has no address space.
    pub fn allocate(self: &Arc<Self>, length: u64) -> Result<Arc<Region>> {
        let size = usize::try_from(length)
            .ok()
            .filter(|size| *size > 0)
            .ok_or_else(|| Error::new(ErrorKind::InvalidArgument, format!("a staged region of {length} bytes")))?;
        let storage = Arc::new(Storage {
            range: AddressRange::reserve(size)?,
            bytes: Mutex::new(vec![0; size].into_boxed_slice()),
        });
        let base = storage.range.base;
        self.shared
            .state
            .lock()
            .storages
            .insert(base as u64, Arc::downgrade(&storage));
        let domain: Arc<dyn MemoryDomain> = Arc::clone(self) as Arc<dyn MemoryDomain>;
        // SAFETY: `storage` keeps the address range mapped (without access) and the bytes alive, and is dropped with
        // the region. Nobody can hold references into a range without access.
        unsafe { Region::from_raw(base.cast::<u8>(), length, domain, Box::new(storage)) }
    }

    /// Every misuse of a staging buffer or ticket seen so far, in words. Tests assert that it is empty.
    pub fn violations(&self) -> Vec<String> {
        self.shared.state.lock().violations.clone()
    }

    /// The next copies fail: so many of those that end after this call.
    pub fn fail_copies(&self, count: u32) {
        self.shared.state.lock().copies_to_fail = count;
    }

    /// Whether copies hang: none is made while this is true.
    pub fn hang_copies(&self, hang: bool) {
        self.shared.state.lock().hung = hang;
        self.shared.changed.notify_all();
    }

    /// Copies that were asked for and have not ended.
    pub fn copies_running(&self) -> usize {
        self.shared.state.lock().pending.len()
    }

    /// From now on the region's address is other memory: it was freed and allocated anew.
    pub fn replace(&self, region: &Region) {
        self.shared.state.lock().replaced.insert(region.address());
    }

    /// How often regions were verified.
    pub fn verified(&self) -> u64 {
        self.shared.state.lock().verified
    }

    /// Bytes of staging buffers that are pinned now.
    pub fn pinned_bytes(&self) -> usize {
        self.shared.state.lock().pinned.iter().map(|buffer| buffer.length).sum()
    }

    /// How it is shared with other domains; not at all, to begin with.
    pub fn sharing(&self) -> &Sharing {
        &self.sharing
    }

    /// Copies finished so far: shows that the staged path was really taken.
    pub fn copies_done(&self) -> u64 {
        self.shared.state.lock().copies_done
    }

    fn start(&self, regions: &[Arc<Region>], segments: &[Segment], staging: HostView, way: Way) -> Result<CopyTicket> {
        let mut state = self.shared.state.lock();
        let (pieces, total) = state.pieces(regions, segments)?;
        if total > staging.length as u64 {
            return Err(Error::new(ErrorKind::OutOfBounds, format!("{total} bytes of segments"))
                .because(format!("the staging buffer has {} bytes", staging.length)));
        }
        let staging = Staging {
            address: staging.pointer as usize,
            length: total as usize,
        };
        if !state.pinned.iter().any(|buffer| buffer.contains(&staging)) {
            let words = format!(
                "staging buffer {:#x}+{} was given to a copy without being pinned",
                staging.address, staging.length
            );
            state.violations.push(words);
        }
        if let Some(other) = state.pending.iter().find(|job| job.staging.overlaps(&staging)) {
            let words = format!(
                "staging buffer {:#x}+{} was given to a new copy while ticket {} still uses it",
                staging.address, staging.length, other.ticket.0
            );
            state.violations.push(words);
        }
        let expected = match way {
            Way::Gather => {
                // SAFETY: the caller owns `staging` and leaves it alone until `Done` (contract of `start_gather`).
                unsafe { staging.bytes_mut() }.fill(UNFINISHED);
                None
            }
            // SAFETY: as above; nothing writes the buffer now.
            Way::Scatter => Some(checksum(unsafe { staging.bytes() })),
        };
        let from = From::Staging(expected);
        Ok(self.queue(state, staging, from, pieces))
    }

    fn queue(&self, mut state: MutexGuard<'_, State>, staging: Staging, from: From, pieces: Vec<Piece>) -> CopyTicket {
        let ticket = CopyTicket(state.next_ticket);
        state.next_ticket += 1;
        let delay_ns = self.shared.delay_max.as_nanos() as u64;
        let delay = Duration::from_nanos(state.rng.below(delay_ns.max(1)));
        state.tickets.insert(ticket, CopyState::Running);
        state.pending.push(Job {
            ticket,
            due: Instant::now() + delay,
            staging,
            pieces,
            from,
        });
        drop(state);
        self.shared.changed.notify_all();
        ticket
    }
}

impl Drop for StagedMemory {
    fn drop(&mut self) {
        self.shared.state.lock().closing = true;
        self.shared.changed.notify_all();
        if let Some(copier) = self.copier.lock().take() {
            // A panic of the copier was printed where it happened.
            let _ = copier.join();
        }
    }
}

impl MemoryDomain for StagedMemory {
    fn name(&self) -> &str {
        "staged"
    }

    fn host_view(&self, _: &Region, _: u64, _: u64) -> Option<HostView> {
        None
    }

    unsafe fn pin_staging(&self, staging: HostView) -> Result<Option<StagingPin>> {
        let buffer = Staging {
            address: staging.pointer as usize,
            length: staging.length,
        };
        let mut state = self.shared.state.lock();
        if state.pinned.iter().any(|other| other.overlaps(&buffer)) {
            let words = format!(
                "staging buffer {:#x}+{} was pinned twice",
                buffer.address, buffer.length
            );
            state.violations.push(words);
        }
        state.pinned.push(buffer);
        drop(state);
        Ok(Some(Box::new(Pin {
            shared: Arc::clone(&self.shared),
            buffer,
        })))
    }

    fn verify(&self, region: &Region) -> Result<()> {
        let mut state = self.shared.state.lock();
        state.verified += 1;
        if state.replaced.contains(&region.address()) {
            return Err(
                Error::new(ErrorKind::NotRegistered, format!("region at {:#x}", region.address()))
                    .because("its memory was freed, and the address belongs to another allocation")
                    .remedy("keep registered memory until its pool is closed"),
            );
        }
        Ok(())
    }

    fn start_gather(&self, regions: &[Arc<Region>], segments: &[Segment], staging: HostView) -> Result<CopyTicket> {
        self.start(regions, segments, staging, Way::Gather)
    }

    fn start_scatter(&self, staging: HostView, regions: &[Arc<Region>], segments: &[Segment]) -> Result<CopyTicket> {
        self.start(regions, segments, staging, Way::Scatter)
    }

    fn export(&self, region: &Arc<Region>) -> Option<Result<Arc<dyn Exported>>> {
        self.sharing.export(self, region)
    }

    fn import(&self, description: &[u8]) -> Option<Arc<dyn Imported>> {
        self.sharing.import(description)
    }

    fn start_import_copy(
        &self,
        from: &[ImportedRun<'_>],
        regions: &[Arc<Region>],
        segments: &[Segment],
    ) -> Result<CopyTicket> {
        let held = sharing::hold(from)?;
        let state = self.shared.state.lock();
        let (pieces, total) = state.pieces(regions, segments)?;
        if from.iter().map(|run| run.length).sum::<u64>() != total {
            return Err(Error::new(ErrorKind::OutOfBounds, format!("{total} bytes of segments"))
                .because("the runs have another sum"));
        }
        self.sharing.copies.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let nowhere = Staging { address: 0, length: 0 };
        Ok(self.queue(state, nowhere, From::Import(held), pieces))
    }

    fn poll_copy(&self, ticket: CopyTicket) -> Result<CopyState> {
        let mut state = self.shared.state.lock();
        match state.tickets.get(&ticket) {
            Some(CopyState::Running) => Ok(CopyState::Running),
            Some(CopyState::Done) => {
                state.tickets.remove(&ticket);
                match state.failed.remove(&ticket) {
                    true => {
                        Err(Error::new(ErrorKind::ResourceExhausted, "a device copy")
                            .because("the test wanted it to fail"))
                    }
                    false => Ok(CopyState::Done),
                }
            }
            None => {
                let words = format!("ticket {} was polled, but is unknown or spent", ticket.0);
                state.violations.push(words.clone());
                Err(Error::new(ErrorKind::InvalidArgument, words))
            }
        }
    }

    fn copy_in(&self, region: &Region, offset: u64, bytes: &[u8]) -> Result<()> {
        region.check(offset, bytes.len() as u64)?;
        let storage = self.shared.state.lock().storage_alive(region)?;
        storage.bytes.lock()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn copy_out(&self, region: &Region, offset: u64, bytes: &mut [u8]) -> Result<()> {
        region.check(offset, bytes.len() as u64)?;
        let storage = self.shared.state.lock().storage_alive(region)?;
        bytes.copy_from_slice(&storage.bytes.lock()[offset as usize..][..bytes.len()]);
        Ok(())
    }
}

#[derive(Debug)]
struct Shared {
    delay_max: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    // By the region's address.
    storages: HashMap<u64, Weak<Storage>>,
    pending: Vec<Job>,
    tickets: HashMap<CopyTicket, CopyState>,
    violations: Vec<String>,
    pinned: Vec<Staging>,
    replaced: HashSet<u64>,
    verified: u64,
    copies_to_fail: u32,
    hung: bool,
    // Whose ticket is to say so.
    failed: HashSet<CopyTicket>,
    copies_done: u64,
    rng: Rng,
    next_ticket: u64,
    closing: bool,
}

impl State {
    /// The segments' storage, and their bytes in all.
    fn pieces(&self, regions: &[Arc<Region>], segments: &[Segment]) -> Result<(Vec<Piece>, u64)> {
        let mut pieces = Vec::with_capacity(segments.len());
        let mut total = 0u64;
        for segment in segments {
            let region = regions.get(segment.region as usize).ok_or_else(|| {
                Error::new(ErrorKind::OutOfBounds, format!("region index {}", segment.region))
                    .because(format!("the list has {} regions", regions.len()))
            })?;
            region.check(segment.offset, segment.length)?;
            pieces.push((self.storage(region)?, segment.offset as usize, segment.length as usize));
            total += segment.length;
        }
        Ok((pieces, total))
    }

    fn storage(&self, region: &Region) -> Result<Weak<Storage>> {
        self.storages.get(&region.address()).cloned().ok_or_else(|| {
            Error::new(ErrorKind::NotRegistered, format!("region at {:#x}", region.address()))
                .because("it was not allocated in this domain")
        })
    }

    fn storage_alive(&self, region: &Region) -> Result<Arc<Storage>> {
        self.storage(region)?.upgrade().ok_or_else(|| {
            Error::new(ErrorKind::Internal, format!("region at {:#x}", region.address()))
                .because("the region lives, but its storage does not")
        })
    }
}

impl Shared {
    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            if state.hung && !state.closing {
                self.changed.wait(&mut state);
                continue;
            }
            let now = Instant::now();
            // Not the earliest, but any that is due: copies finish out of order.
            if let Some(index) = state.pending.iter().position(|job| job.due <= now || state.closing) {
                let job = state.pending.swap_remove(index);
                // The copy itself runs under the lock: whoever polls sees either before or after.
                if state.copies_to_fail > 0 {
                    state.copies_to_fail -= 1;
                    state.failed.insert(job.ticket);
                } else {
                    let outcome = job.copy();
                    state.violations.extend(outcome.err());
                }
                state.copies_done += 1;
                state.tickets.insert(job.ticket, CopyState::Done);
                continue;
            }
            if state.closing {
                return;
            }
            match state.pending.iter().map(|job| job.due).min() {
                Some(due) => {
                    self.changed.wait_until(&mut state, due);
                }
                None => self.changed.wait(&mut state),
            }
        }
    }
}

/// Keeps a buffer pinned.
struct Pin {
    shared: Arc<Shared>,
    buffer: Staging,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.pinned.retain(|other| other.address != self.buffer.address);
        if let Some(job) = state.pending.iter().find(|job| job.staging.overlaps(&self.buffer)) {
            let words = format!("ticket {} runs on a buffer that was unpinned", job.ticket.0);
            state.violations.push(words);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(domain: &StagedMemory, ticket: CopyTicket) {
        while domain.poll_copy(ticket).unwrap() == CopyState::Running {
            std::thread::yield_now();
        }
    }

    fn view(buffer: &mut [u8]) -> HostView {
        HostView {
            pointer: buffer.as_mut_ptr(),
            length: buffer.len(),
        }
    }

    fn pin(domain: &StagedMemory, buffer: &mut [u8]) -> Option<StagingPin> {
        // SAFETY: the tests drop the pin before the buffer.
        unsafe { domain.pin_staging(view(buffer)) }.unwrap()
    }

    #[test]
    fn bytes_go_out_and_come_back_through_staging() {
        let domain = StagedMemory::new(Duration::from_millis(2), 1).unwrap();
        let regions = [domain.allocate(100).unwrap(), domain.allocate(50).unwrap()];
        assert!(regions[0].host_view(0, 1).is_none());
        regions[0].copy_in(10, &[1, 2, 3]).unwrap();
        regions[1].copy_in(0, &[4, 5]).unwrap();
        let segment = |region, offset, length| Segment { region, offset, length };
        let mut staging = vec![0u8; 5];
        let _pin = pin(&domain, &mut staging);
        let segments = [segment(0, 10, 3), segment(1, 0, 2)];
        let ticket = domain.start_gather(&regions, &segments, view(&mut staging)).unwrap();
        wait(&domain, ticket);
        assert_eq!(staging, [1, 2, 3, 4, 5]);
        let segments = [segment(1, 40, 4), segment(0, 0, 1)];
        let ticket = domain.start_scatter(view(&mut staging), &regions, &segments).unwrap();
        wait(&domain, ticket);
        let mut out = [0; 4];
        regions[1].copy_out(40, &mut out).unwrap();
        assert_eq!(out, [1, 2, 3, 4]);
        assert!(domain.violations().is_empty());
        assert_eq!(domain.copies_done(), 2);
    }

    #[test]
    fn a_buffer_reused_before_done_is_seen() {
        let domain = StagedMemory::new(Duration::from_secs(600), 2).unwrap();
        let regions = [domain.allocate(8).unwrap()];
        let segments = [Segment {
            region: 0,
            offset: 0,
            length: 8,
        }];
        let mut staging = vec![7u8; 8];
        let pinned = pin(&domain, &mut staging);
        let _ = domain.start_scatter(view(&mut staging), &regions, &segments).unwrap();
        let _ = domain.start_gather(&regions, &segments, view(&mut staging)).unwrap();
        assert!(domain.violations()[0].contains("while ticket 1 still uses it"));
        let shared = Arc::clone(&domain.shared);
        drop(regions);
        drop(domain);
        drop(pinned);
        let violations = shared.state.lock().violations.clone();
        assert!(
            violations.len() >= 2,
            "the rewritten scatter is seen when it runs: {violations:?}"
        );
    }

    #[test]
    fn a_run_outside_the_region_and_a_spent_ticket_are_refused() {
        let domain = StagedMemory::new(Duration::ZERO, 3).unwrap();
        let regions = [domain.allocate(8).unwrap()];
        let mut staging = vec![0u8; 8];
        let outside = [Segment {
            region: 0,
            offset: 4,
            length: 8,
        }];
        let refused = domain.start_gather(&regions, &outside, view(&mut staging)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::OutOfBounds);
        assert!(domain.poll_copy(CopyTicket(99)).is_err());
        assert_eq!(domain.violations().len(), 1);
    }
}

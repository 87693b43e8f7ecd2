//! The memory domain of one device: how transports see its memory.

pub(crate) mod copier;
mod counters;
mod dmabuf;
pub(crate) mod gate;
mod imports;
mod job;
pub(crate) mod pinned;
mod progress;
mod queue;
mod slow;
mod streams;

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::CUcontext;
use kvxfer_core::memory::{
    CopyState, CopyTicket, DmaBuf, Exported, HostView, Imported, ImportedRun, MemoryDomain, Region, Segment, StagingPin,
};
use kvxfer_core::transport::Counter;
use kvxfer_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::config::Gather;
use crate::context::Primary;
use crate::driver::{Driver, Refused};
use crate::error::CudaError;
use crate::event::Captures;
use crate::pointer::{self, Mapping, Range};
use crate::probe::DeviceFacts;
use crate::share::Share;
use copier::Copier;
use imports::ImportCopies;
use job::{Direction, Piece};
use pinned::Pins;
use slow::Slow;

/// Mappings of a region that one `verify` asks for; regions with more are asked for in turn.
const VERIFIED_AT_ONCE: usize = 64;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX`, `…_TO_OWNER`.
const FLUSH_CURRENT: u32 = 0;
const FLUSH_TO_OWNER: u32 = 100;

/// A device's memory.
pub(crate) struct Domain {
    name: String,
    facts: DeviceFacts,
    // Before what its thread uses.
    copier: Copier,
    slow: Slow,
    /// Copies of others' memory, which stays mapped for them.
    imports: ImportCopies,
    share: Option<Arc<Share>>,
    pub(crate) captures: Arc<Captures>,
    pins: Arc<Pins>,
    regions: Mutex<HashMap<usize, Arc<Known>>>,
    pub(crate) primary: Arc<Primary>,
}

/// What is known of a region.
#[derive(Debug)]
struct Known {
    address: u64,
    length: u64,
    mappings: Vec<Mapping>,
    /// Why network devices may not be given it; empty: they may.
    refusal: String,
    /// Where `verify` goes on.
    next: AtomicUsize,
}

impl Domain {
    /// The domain of the device that memory was found on. `owner` is the context that the memory was allocated in, null
    /// if in none.
    pub(crate) fn open(
        driver: &Arc<Driver>,
        facts: &DeviceFacts,
        choice: Gather,
        pins: &Arc<Pins>,
        share: &Option<Arc<Share>>,
        owner: CUcontext,
    ) -> std::result::Result<Arc<Domain>, CudaError> {
        let name = format!("cuda:{}", facts.pci);
        let failed = |refused| CudaError::call(refused, name.clone());
        // Memory of a context that is not the primary one says nothing of the primary one: it is not made for it.
        if !owner.is_null() && !Primary::exists(driver, facts.ordinal).map_err(failed)? {
            return Err(foreign(&name));
        }
        let primary = Arc::new(Primary::retain(driver, facts.ordinal).map_err(failed)?);
        let copier = Copier::new(&primary, facts.ordinal, &name, choice, pins.bytes());
        let domain = Domain {
            imports: ImportCopies::new(&copier),
            copier,
            slow: Slow::new(&primary, pins.bytes()),
            share: share.clone(),
            captures: Captures::new(&primary, &name),
            pins: Arc::clone(pins),
            regions: Mutex::default(),
            facts: facts.clone(),
            name,
            primary,
        };
        domain.check_owner(owner)?;
        Ok(Arc::new(domain))
    }

    /// Refuses memory of a context that is not the one that we work in.
    pub(crate) fn check_owner(&self, owner: CUcontext) -> std::result::Result<(), CudaError> {
        if owner.is_null() || owner == self.primary.context() {
            Ok(())
        } else {
            Err(foreign(&self.name))
        }
    }

    /// A region of the device's memory.
    ///
    /// # Safety
    /// As [`Region::from_raw`].
    pub(crate) unsafe fn region(
        self: &Arc<Domain>,
        devices: &[DeviceFacts],
        address: u64,
        length: u64,
        keepalive: Box<dyn Any + Send + Sync>,
    ) -> Result<Arc<Region>> {
        let range = {
            let _current = self.enter()?;
            pointer::walk(self.driver(), devices, self.facts.ordinal, address, length)?
        };
        if !range.unsynced.is_empty() {
            tracing::debug!(domain = self.name, why = range.unsynced, "SYNC_MEMOPS was not accepted");
        }
        let known = Arc::new(Known {
            address,
            length,
            refusal: self.network_refusal(&range).unwrap_or_default(),
            mappings: range.mappings,
            next: AtomicUsize::new(0),
        });
        let entry = Arc::new(Entry {
            domain: Arc::clone(self),
            key: OnceLock::new(),
        });
        let domain = Arc::clone(self) as Arc<dyn MemoryDomain>;
        let keepalive = Box::new((Arc::clone(&entry), keepalive));
        // SAFETY: the caller's contract.
        let region = unsafe { Region::from_raw(address as *mut u8, length, domain, keepalive) }?;
        let key = Arc::as_ptr(&region) as usize;
        self.regions.lock().insert(key, known);
        // Set once, here.
        let _ = entry.key.set(key);
        Ok(region)
    }

    /// Why network devices may not be given a range, if so.
    fn network_refusal(&self, range: &Range) -> Option<String> {
        if let Some(why) = self.facts.gpudirect_refusal() {
            return Some(why.to_owned());
        }
        let unfit = range
            .mappings
            .iter()
            .find(|mapping| mapping.vmm && !(mapping.gpudirect && self.facts.gpudirect_vmm));
        unfit.map(|mapping| {
            let base = mapping.extent.base;
            if self.facts.gpudirect_vmm {
                format!("the mapping at {base:#x} was made without gpuDirectRDMACapable")
            } else {
                format!("the memory at {base:#x} is mapped by virtual memory management, for which the device has no GPUDirect RDMA")
            }
        })
    }

    fn known(&self, region: &Region) -> Result<Arc<Known>> {
        let known = self.regions.lock().get(&(std::ptr::from_ref(region) as usize)).cloned();
        known.ok_or_else(|| {
            Error::new(ErrorKind::NotRegistered, "a region")
                .at(pointer::show(region.address(), region.length()))
                .because(format!("{} does not know it", self.name))
                .remedy("make regions of CUDA memory with Cuda::region")
        })
    }

    fn driver(&self) -> &Arc<Driver> {
        self.primary.driver()
    }

    fn enter(&self) -> Result<crate::context::Current<'_>> {
        Ok(self.primary.enter().map_err(|refused| self.failed(refused))?)
    }

    fn failed(&self, refused: Refused) -> CudaError {
        CudaError::call(refused, self.name.clone())
    }

    /// What is counted.
    pub(crate) fn report(&self, out: &mut Vec<Counter>) {
        self.copier.counters().report(&self.name, out);
        self.imports.report(&self.name, out);
        self.captures.report(&self.name, out);
    }

    /// Why something is done in another way than the best, each with the device's name.
    pub(crate) fn notes(&self) -> Vec<String> {
        let notes = self.copier.notes().into_iter();
        notes.map(|note| format!("{}: {note}", self.name)).collect()
    }

    /// Lists a copy's pieces. What lies next to each other on both sides is one.
    fn pieces(
        &self,
        regions: &[Arc<Region>],
        segments: &[Segment],
        staging: HostView,
        pieces: &mut Vec<Piece>,
    ) -> Result<()> {
        let mut at = staging.pointer as u64;
        let end = at + staging.length as u64;
        for segment in segments.iter().filter(|segment| segment.length > 0) {
            let region = self.part(regions, segment)?;
            if segment.length > end - at {
                return Err(Error::new(ErrorKind::OutOfBounds, "segments of a copy")
                    .at(&*self.name)
                    .because(format!(
                        "they are longer than their staging of {} bytes",
                        staging.length
                    )));
            }
            let device = region.address() + segment.offset;
            match pieces.last_mut() {
                Some(last) if last.device + last.length == device => last.length += segment.length,
                _ => pieces.push(Piece {
                    device,
                    staging: at,
                    length: segment.length,
                }),
            }
            at += segment.length;
        }
        Ok(())
    }

    /// The region that a segment names, and lies in.
    // Once for each piece: a call would cost a fifth of all that a piece costs.
    #[inline(always)]
    fn part<'a>(&self, regions: &'a [Arc<Region>], segment: &Segment) -> Result<&'a Arc<Region>> {
        let region = regions.get(segment.region as usize).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, format!("region {}", segment.region))
                .at(&*self.name)
                .because(format!("there are {}", regions.len()))
        })?;
        region.check(segment.offset, segment.length)?;
        Ok(region)
    }

    fn start(
        &self,
        direction: Direction,
        regions: &[Arc<Region>],
        segments: &[Segment],
        staging: HostView,
    ) -> Result<CopyTicket> {
        let ordinal = self.facts.ordinal;
        let offset = self
            .pins
            .to_device(ordinal, staging.pointer as u64, staging.length as u64);
        self.copier.start(direction, offset, |pieces| {
            self.pieces(regions, segments, staging, pieces)
        })
    }
}

fn foreign(device: &str) -> CudaError {
    CudaError::Unfit {
        kind: ErrorKind::InvalidArgument,
        what: format!("memory of {device}"),
        why: "it belongs to a context that is not the device's primary one".into(),
        remedy: "allocate it in the primary context, as the CUDA runtime and the frameworks on it do",
    }
}

/// Lives as long as a region, and then takes it from its domain's list.
struct Entry {
    domain: Arc<Domain>,
    key: OnceLock<usize>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(key) = self.key.get() {
            self.domain.regions.lock().remove(key);
        }
    }
}

impl MemoryDomain for Domain {
    fn name(&self) -> &str {
        &self.name
    }

    fn host_view(&self, _: &Region, _: u64, _: u64) -> Option<HostView> {
        None
    }

    unsafe fn pin_staging(&self, staging: HostView) -> Result<Option<StagingPin>> {
        self.copier.warm()?;
        let (base, length) = (staging.pointer as u64, staging.length as u64);
        // SAFETY: the caller keeps the buffer until the guard is dropped.
        let pinned = unsafe { self.pins.pin(&self.primary, self.facts.ordinal, base, length) };
        match pinned {
            Ok(pin) => Ok(pin.map(|pin| Box::new(pin) as StagingPin)),
            Err(refused) => Err(
                Error::new(ErrorKind::ResourceExhausted, "a staging buffer cannot be page-locked")
                    .at(format!("{}, {}", self.name, pointer::show(base, length)))
                    .because(refused.to_string())
                    .remedy("raise the limit of locked memory (`ulimit -l`), or make staging smaller"),
            ),
        }
    }

    fn start_gather(&self, regions: &[Arc<Region>], segments: &[Segment], staging: HostView) -> Result<CopyTicket> {
        self.start(Direction::Out, regions, segments, staging)
    }

    fn start_scatter(&self, staging: HostView, regions: &[Arc<Region>], segments: &[Segment]) -> Result<CopyTicket> {
        self.start(Direction::In, regions, segments, staging)
    }

    fn export(&self, region: &Arc<Region>) -> Option<Result<Arc<dyn Exported>>> {
        let share = self.share.as_ref()?;
        let exported = self.known(region).and_then(|known| {
            let shared = share.export(region, &self.primary, &self.facts, &known.mappings);
            shared.map_err(Error::from)
        });
        Some(exported)
    }

    fn import(&self, description: &[u8]) -> Option<Arc<dyn Imported>> {
        let share = self.share.as_ref()?;
        Some(share.import(&self.primary, &self.facts, description))
    }

    fn start_import_copy(
        &self,
        from: &[ImportedRun<'_>],
        regions: &[Arc<Region>],
        segments: &[Segment],
    ) -> Result<CopyTicket> {
        self.start_imported(from, regions, segments)
    }

    fn poll_copy(&self, ticket: CopyTicket) -> Result<CopyState> {
        if imports::is_one(ticket) {
            return self.poll_imported(ticket);
        }
        Ok(self.copier.poll(ticket)?)
    }

    fn copy_in(&self, region: &Region, offset: u64, bytes: &[u8]) -> Result<()> {
        region.check(offset, bytes.len() as u64)?;
        Ok(self
            .slow
            .copy_in(&self.copier, &self.name, region.address() + offset, bytes)?)
    }

    fn copy_out(&self, region: &Region, offset: u64, bytes: &mut [u8]) -> Result<()> {
        region.check(offset, bytes.len() as u64)?;
        Ok(self
            .slow
            .copy_out(&self.copier, &self.name, region.address() + offset, bytes)?)
    }

    fn dmabufs(&self, region: &Region) -> Option<Result<Vec<DmaBuf>>> {
        Some(self.export_dmabufs(region))
    }

    fn peer_address(&self, region: &Region) -> Option<u64> {
        let known = self.known(region).ok()?;
        // A driver that takes addresses takes one allocation's at a time.
        let fit = known.refusal.is_empty() && known.mappings.len() == 1;
        fit.then_some(known.address)
    }

    fn settle_writes(&self, _: &Region) -> Result<()> {
        if !self.facts.settles_writes() {
            return Ok(());
        }
        let _current = self.enter()?;
        // SAFETY: takes two numbers, and the context that is current.
        unsafe { self.driver().flush_writes(FLUSH_CURRENT, FLUSH_TO_OWNER) }
            .map_err(|refused| self.failed(refused).into())
    }

    fn verify(&self, region: &Region) -> Result<()> {
        let known = self.known(region)?;
        let count = known.mappings.len();
        let asked = count.min(VERIFIED_AT_ONCE);
        let first = known.next.fetch_add(asked, Ordering::Relaxed);
        for index in (first..first + asked).map(|index| index % count) {
            let mapping = &known.mappings[index];
            let at = mapping.extent.base.max(known.address);
            let there = pointer::still_there(self.driver(), mapping, at).map_err(|refused| self.failed(refused))?;
            if !there {
                return Err(Error::new(
                    ErrorKind::NotRegistered,
                    "memory that was registered is not there any more",
                )
                .at(format!("{}, {}", self.name, pointer::show(known.address, known.length)))
                .because(format!("at {at:#x} is other memory now, or none"))
                .remedy("close the pool before its memory is freed, or keep the memory"));
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Domain({})", self.name)
    }
}

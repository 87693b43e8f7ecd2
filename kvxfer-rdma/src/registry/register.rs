//! Registering: all chunks of all regions on all devices, by several threads, all or nothing.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvxfer_core::memory::{DmaBuf, Region};
use kvxfer_core::transport::RegionAccess;
use kvxfer_core::wire::limits::POOL_KEYS_BYTES_MAX;
use kvxfer_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use super::chunks::Chunks;
use super::keys::{EDGE_BYTES_MAX, HEADER_BYTES_MAX, KEY_BYTES_MAX, PAGE_BYTES, REGION_BYTES_MAX, REGIONS_MAX};
use super::{ChunkKeys, Reach};
use crate::verbs::{Access, MemoryRegion, ProtectionDomain, VerbsError};

/// How regions are registered.
#[derive(Debug, Clone)]
pub struct RegistryOptions {
    /// Threads that register at the same time, at least 1.
    pub registration_threads: usize,
    /// Bytes of one registration at most, below what the devices allow. Rounded down to pages, at least one.
    pub chunk_bytes_max: u64,
    /// Let writes reach memory out of order inside a work request, where the device can.
    pub relaxed_ordering: bool,
    /// How often a registration that takes long says how far it is.
    pub progress_every: Duration,
}

impl Default for RegistryOptions {
    fn default() -> Self {
        RegistryOptions {
            registration_threads: thread::available_parallelism().map_or(1, usize::from).min(8),
            chunk_bytes_max: u64::MAX,
            relaxed_ordering: false,
            progress_every: Duration::from_secs(5),
        }
    }
}

/// A region and how devices reach it.
pub(super) struct RegisteredRegion {
    pub(super) region: Arc<Region>,
    pub(super) reach: Reach,
    /// What was refused on the way, for people.
    pub(super) refusals: String,
}

/// Registers everything, or nothing.
pub(super) fn register(
    devices: &[ProtectionDomain],
    options: &RegistryOptions,
    regions: &[Arc<Region>],
    access: RegionAccess,
) -> Result<Vec<RegisteredRegion>> {
    if regions.len() > REGIONS_MAX {
        return Err(
            Error::new(ErrorKind::InvalidArgument, format!("{} regions", regions.len()))
                .because(format!("a pool has at most {REGIONS_MAX}"))
                .remedy("register the cache as fewer, larger regions"),
        );
    }
    let chunk_bytes = chunk_bytes(devices, options);
    let sources = regions
        .iter()
        .map(|region| Source::of(region, chunk_bytes))
        .collect::<Result<Vec<Source>>>()?;
    let jobs: Vec<Job> = (0..devices.len())
        .flat_map(|device| {
            sources.iter().enumerate().flat_map(move |(region, source)| {
                (0..source.chunks.count()).map(move |chunk| Job { device, region, chunk })
            })
        })
        .collect();
    let edges = sources.iter().map(|source| source.chunks.edges().count()).sum();
    check_key_count(jobs.len(), edges, regions.len(), devices.len())?;
    let work = Work {
        devices,
        options,
        sources: &sources,
        access,
        bytes: sources.iter().map(|source| source.chunks.length()).sum::<u64>() * devices.len() as u64,
        next: AtomicUsize::new(0),
        failed: AtomicBool::new(false),
        results: Mutex::new(Results {
            made: jobs.iter().map(|_| None).collect(),
            refusals: sources.iter().map(|source| source.refusals.clone()).collect(),
            staged: sources.iter().map(|source| source.ways().is_empty()).collect(),
            bytes: 0,
            error: None,
            started: Instant::now(),
            last_report: Instant::now(),
        }),
        jobs,
    };
    work.run_all();
    let results = work.results.into_inner();
    // What was made is dropped, and so deregistered, with `results`.
    if let Some(error) = results.error {
        return Err(error);
    }
    let mut made = results.made.into_iter();
    let mut per_region: Vec<Vec<Vec<ChunkKeys>>> = sources.iter().map(|_| Vec::new()).collect();
    for _ in devices {
        for (source, keys) in sources.iter().zip(&mut per_region) {
            keys.push(made.by_ref().take(source.chunks.count()).flatten().collect());
        }
    }
    let refused = results.staged.into_iter().zip(results.refusals);
    let all = regions.iter().zip(sources).zip(per_region).zip(refused);
    Ok(all
        .map(|(((region, source), keys), (staged, refusals))| RegisteredRegion {
            region: region.clone(),
            // What some device took of it is given back here.
            reach: match staged {
                true => Reach::Staging,
                false => Reach::Devices {
                    chunks: source.chunks,
                    devices: keys,
                },
            },
            refusals: refusals.join("; "),
        })
        .collect())
}

/// Refuses what a peer cannot be told, before anything is pinned.
fn check_key_count(keys: usize, edges: usize, regions: usize, devices: usize) -> Result<()> {
    let bytes = regions * REGION_BYTES_MAX + edges * EDGE_BYTES_MAX + keys * KEY_BYTES_MAX + HEADER_BYTES_MAX;
    if bytes <= POOL_KEYS_BYTES_MAX {
        return Ok(());
    }
    Err(
        Error::new(ErrorKind::ResourceExhausted, format!("{keys} registration keys"))
            .at(format!("{regions} regions on {devices} devices"))
            .because(format!(
                "a peer can be told {POOL_KEYS_BYTES_MAX} bytes, these may take {bytes}"
            ))
            .remedy(
                "use fewer devices, fewer and larger regions, or larger registrations (rdma.registration_bytes_max)",
            ),
    )
}

/// The size of a chunk: the least of what the devices and the configuration allow, in whole pages.
fn chunk_bytes(devices: &[ProtectionDomain], options: &RegistryOptions) -> u64 {
    // SAFETY: a plain question. (Through libc: rustix's own way to the answer fails under valgrind.)
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let page = u64::try_from(page).unwrap_or(PAGE_BYTES).max(PAGE_BYTES);
    devices
        .iter()
        .map(|device| device.context().attributes().max_mr_size)
        // A driver that says 0 does not say.
        .filter(|&size| size > 0)
        .fold(options.chunk_bytes_max, u64::min)
        .checked_div(page)
        .map_or(page, |pages| pages.max(1).saturating_mul(page))
}

/// Where a region's memory can be registered from.
struct Source {
    chunks: Chunks,
    place: String,
    /// Tried first, one for each mapping; none if its domain makes none.
    dmabufs: Vec<DmaBuf>,
    /// Tried next: registration by address.
    address: Option<ByAddress>,
    /// A refusal is no failure: the region then goes through staging.
    may_be_staged: bool,
    /// What was refused before any device was asked.
    refusals: Vec<String>,
}

/// What makes an address one that a device may know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ByAddress {
    /// It is the host's memory.
    Host,
    /// The device's driver may know the memory's.
    Peer,
}

/// A way of registering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    DmaBuf,
    Address(ByAddress),
}

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Way::DmaBuf => "dmabuf",
            Way::Address(ByAddress::Host) => "host memory",
            Way::Address(ByAddress::Peer) => "peer memory",
        }
    }
}

impl Source {
    fn of(region: &Arc<Region>, chunk_bytes: u64) -> Result<Source> {
        let domain = region.domain();
        let place = format!("region of {} bytes in {}", region.length(), domain.name());
        let host = region.host_view(0, region.length());
        let host = host.map(|view| view.pointer.expose_provenance() as u64);
        let mut refusals = Vec::new();
        let dmabufs = match domain.dmabufs(region) {
            Some(Ok(dmabufs)) => dmabufs,
            // The host's view serves as well.
            Some(Err(error)) if host.is_some() => {
                tracing::info!(%error, place, "registering through the host's view");
                Vec::new()
            }
            Some(Err(error)) => {
                refusals.push(format!("dmabuf: {error}"));
                Vec::new()
            }
            None => {
                if host.is_none() {
                    refusals.push("dmabuf: its domain makes none".to_owned());
                }
                Vec::new()
            }
        };
        let edges = edges(&dmabufs, region.length()).map_err(|why| {
            Error::new(ErrorKind::Internal, "dmabufs that do not fit their region")
                .at(place.clone())
                .because(why)
        })?;
        // Host memory is named by its address in this process; a dmabuf by whatever we choose, which is the region's
        // address in its own domain. All ways must come to the same address: peers are told one.
        let base = match (dmabufs.is_empty(), host) {
            (true, Some(host)) => host,
            _ => region.address(),
        };
        let address = match (host, domain.peer_address(region)) {
            (Some(host), _) => (host == base).then_some(ByAddress::Host),
            (None, Some(peer)) if peer == base => Some(ByAddress::Peer),
            (None, Some(_)) => {
                refusals.push("peer memory: it has another address there".to_owned());
                None
            }
            (None, None) => {
                refusals.push("peer memory: its domain names no address".to_owned());
                None
            }
        };
        Ok(Source {
            chunks: Chunks::new(base, region.length(), chunk_bytes, &edges).ok_or_else(|| {
                Error::new(ErrorKind::InvalidArgument, "a region that cannot be registered")
                    .at(place.clone())
                    .because("its address plus its length overflows")
            })?,
            place,
            dmabufs,
            address,
            may_be_staged: host.is_none(),
            refusals,
        })
    }

    fn ways(&self) -> Vec<Way> {
        let dmabuf = (!self.dmabufs.is_empty()).then_some(Way::DmaBuf);
        dmabuf.into_iter().chain(self.address.map(Way::Address)).collect()
    }
}

/// Where the dmabufs after the first begin in the region.
fn edges(dmabufs: &[DmaBuf], length: u64) -> Result<Vec<u64>, String> {
    if dmabufs.is_empty() {
        return Ok(Vec::new());
    }
    let mut edges = Vec::with_capacity(dmabufs.len());
    let mut end = 0u64;
    for dmabuf in dmabufs {
        end = end.checked_add(dmabuf.length).ok_or("their lengths overflow")?;
        edges.push(end);
    }
    if end < length {
        return Err(format!("they are too small: they have {end} bytes of it"));
    }
    // The last one's end is the region's.
    edges.pop();
    if edges.last().is_some_and(|last| *last >= length) {
        return Err("there are more than the region needs".to_owned());
    }
    Ok(edges)
}

#[derive(Clone, Copy)]
struct Job {
    device: usize,
    region: usize,
    chunk: usize,
}

struct Work<'a> {
    devices: &'a [ProtectionDomain],
    options: &'a RegistryOptions,
    sources: &'a [Source],
    access: RegionAccess,
    jobs: Vec<Job>,
    /// Bytes to be registered, counted once per device.
    bytes: u64,
    next: AtomicUsize,
    failed: AtomicBool,
    results: Mutex<Results>,
}

struct Results {
    made: Vec<Option<ChunkKeys>>,
    /// By region: what was refused.
    refusals: Vec<Vec<String>>,
    /// By region: some device takes it in no way.
    staged: Vec<bool>,
    bytes: u64,
    error: Option<Error>,
    started: Instant,
    last_report: Instant,
}

impl Work<'_> {
    fn run_all(&self) {
        let threads = self.options.registration_threads.clamp(1, self.jobs.len().max(1));
        thread::scope(|scope| {
            for index in 1..threads {
                let spawned = thread::Builder::new()
                    .name(format!("kvx-reg-{index}"))
                    .spawn_scoped(scope, || self.run());
                if let Err(error) = spawned {
                    // The threads that there are do the work, at least this one.
                    tracing::warn!(%error, "fewer registration threads than configured");
                    break;
                }
            }
            self.run();
        });
    }

    fn run(&self) {
        while !self.failed.load(Ordering::Relaxed) {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = self.jobs.get(index) else {
                return;
            };
            if self.results.lock().staged[job.region] {
                continue;
            }
            let (made, refused) = self.register_chunk(*job);
            let source = &self.sources[job.region];
            let mut results = self.results.lock();
            for refusal in refused {
                // Devices and chunks mostly say the same.
                let known = &mut results.refusals[job.region];
                if !known.contains(&refusal) {
                    known.push(refusal);
                }
            }
            match made {
                Ok(keys) => {
                    results.made[index] = Some(keys);
                    results.bytes += source.chunks.bytes(job.chunk);
                    self.report(&mut results);
                }
                Err(_) if source.may_be_staged => results.staged[job.region] = true,
                Err(error) => {
                    self.failed.store(true, Ordering::Relaxed);
                    results.error.get_or_insert(error);
                }
            }
        }
    }

    /// Registers a chunk in the first way that the device takes, and says which ways it refused.
    fn register_chunk(&self, job: Job) -> (Result<ChunkKeys>, Vec<String>) {
        let source = &self.sources[job.region];
        let mut refused = Vec::new();
        let mut last = None;
        for way in source.ways() {
            match self.register_in(way, job) {
                Ok(keys) => return (Ok(keys), refused),
                // The host's view is for devices that do not know dmabufs; what else they refuse is a failure.
                Err(error) if !source.may_be_staged && error.kind() != ErrorKind::Unsupported => {
                    return (Err(error), Vec::new());
                }
                Err(error) => {
                    tracing::debug!(%error, place = source.place, way = way.name(), "a registration was refused");
                    if source.may_be_staged {
                        refused.push(format!("{}: {error}", way.name()));
                    }
                    last = Some(error);
                }
            }
        }
        let none = || Error::new(ErrorKind::Unsupported, "memory that no device can be given").at(source.place.clone());
        (Err(last.unwrap_or_else(none)), refused)
    }

    fn register_in(&self, way: Way, job: Job) -> Result<ChunkKeys> {
        let source = &self.sources[job.region];
        let domain = &self.devices[job.device];
        let length = source.chunks.bytes(job.chunk);
        let rights = rights(self.access, self.options.relaxed_ordering);
        let memory = source.register(way, domain, job.chunk, length, rights)?;
        let flush = match self.access {
            // Peers must not read what they may only write: the flush has a key of its own.
            RegionAccess {
                receives: true,
                serves: false,
            } => {
                let readable = Access {
                    remote_read: true,
                    ..Access::default()
                };
                Some(source.register(way, domain, job.chunk, length.min(PAGE_BYTES), readable)?)
            }
            _ => None,
        };
        Ok(ChunkKeys {
            lkey: memory.lkey(),
            rkey: memory.rkey(),
            flush_rkey: flush.as_ref().map_or(memory.rkey(), MemoryRegion::rkey),
            memory,
            flush,
        })
    }

    fn report(&self, results: &mut Results) {
        if results.last_report.elapsed() < self.options.progress_every || results.bytes >= self.bytes {
            return;
        }
        results.last_report = Instant::now();
        tracing::info!(
            seconds = results.started.elapsed().as_secs(),
            "registering memory: {} of {} done",
            crate::text::bytes(results.bytes),
            crate::text::bytes(self.bytes)
        );
    }
}

impl Source {
    fn register(
        &self,
        way: Way,
        domain: &ProtectionDomain,
        chunk: usize,
        length: u64,
        access: Access,
    ) -> Result<MemoryRegion> {
        let start = self.chunks.start(chunk);
        let made = match way {
            Way::DmaBuf => {
                let (mapping, inside) = self.chunks.in_mapping(chunk);
                let dmabuf = &self.dmabufs[mapping];
                domain.register_dmabuf(dmabuf.fd.as_fd(), dmabuf.offset + inside, length, start, access)
            }
            // A driver that does not know another device's memory refuses its address.
            Way::Address(_) => {
                // SAFETY: inside the region, which its maker vouched stays mapped, readable and writable while it lives, without
                // references into it; whoever holds the registration holds the region (`RegionKeys`, then `Retired`).
                unsafe { domain.register(start, length, access) }
            }
        };
        made.map_err(|error: VerbsError| error.in_place(&self.place))
    }
}

/// The least rights that a role needs. A pool that receives is also where reads land.
fn rights(access: RegionAccess, relaxed_ordering: bool) -> Access {
    Access {
        local_write: access.receives,
        remote_write: access.receives,
        remote_read: access.serves,
        relaxed_ordering,
    }
}

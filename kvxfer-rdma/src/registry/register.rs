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

use super::ChunkKeys;
use super::keys::{Chunks, HEADER_BYTES_MAX, KEY_BYTES_MAX, PAGE_BYTES, REGION_BYTES_MAX, REGIONS_MAX};
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

/// A region, where its chunks are, and per device their keys.
pub(super) type RegisteredRegion = (Arc<Region>, Chunks, Vec<Vec<ChunkKeys>>);

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
    check_key_count(jobs.len(), regions.len(), devices.len())?;
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
    let mut made = results.made.into_iter().flatten();
    let mut per_region: Vec<Vec<Vec<ChunkKeys>>> = sources.iter().map(|_| Vec::new()).collect();
    for _ in devices {
        for (source, keys) in sources.iter().zip(&mut per_region) {
            keys.push(made.by_ref().take(source.chunks.count()).collect());
        }
    }
    Ok(regions
        .iter()
        .zip(sources)
        .zip(per_region)
        .map(|((region, source), keys)| (region.clone(), source.chunks, keys))
        .collect())
}

/// Refuses what a peer cannot be told, before anything is pinned.
fn check_key_count(keys: usize, regions: usize, devices: usize) -> Result<()> {
    let bytes = regions * REGION_BYTES_MAX + keys * KEY_BYTES_MAX + HEADER_BYTES_MAX;
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
    // Tried first where there is one.
    dmabuf: Option<DmaBuf>,
    host: bool,
}

impl Source {
    fn of(region: &Arc<Region>, chunk_bytes: u64) -> Result<Source> {
        let domain = region.domain();
        let place = format!("region of {} bytes in {}", region.length(), domain.name());
        let host = region.host_view(0, region.length());
        let dmabufs = domain.dmabufs(region).map(|made| {
            made.and_then(|mut made| match (made.len(), made.pop()) {
                (1, Some(only)) => Ok(only),
                (count, _) => Err(Error::new(ErrorKind::Unsupported, "memory of several mappings")
                    .at(place.clone())
                    .because(format!("its domain has {count} dmabufs for it"))),
            })
        });
        let dmabuf = match dmabufs {
            Some(Ok(dmabuf)) if dmabuf.length < region.length() => {
                return Err(Error::new(ErrorKind::Internal, "a dmabuf is too small")
                    .at(place)
                    .because(format!("it has {} bytes of the region", dmabuf.length)));
            }
            Some(Ok(dmabuf)) => Some(dmabuf),
            // The host's view serves as well.
            Some(Err(error)) if host.is_some() => {
                tracing::info!(%error, place, "registering through the host's view");
                None
            }
            Some(Err(error)) => return Err(error),
            None => None,
        };
        // Host memory is named by its address in this process; a dmabuf by whatever we choose, which is the region's
        // address in its own domain.
        let base = match (&dmabuf, host) {
            (Some(_), _) => region.address(),
            (None, Some(view)) => view.pointer.expose_provenance() as u64,
            (None, None) => {
                return Err(Error::new(ErrorKind::Unsupported, "memory that no device can be given")
                    .at(place)
                    .because("the host cannot see it and its domain offers no dmabuf")
                    .remedy("use another transport for this pool, or memory whose domain offers dmabufs"));
            }
        };
        // A device that refuses the dmabuf may take the host's view, if that has the same address: peers are told one.
        let host = host.is_some_and(|view| view.pointer.expose_provenance() as u64 == base);
        Ok(Source {
            chunks: Chunks::new(base, region.length(), chunk_bytes).ok_or_else(|| {
                Error::new(ErrorKind::InvalidArgument, "a region that cannot be registered")
                    .at(place.clone())
                    .because("its address plus its length overflows")
            })?,
            place,
            dmabuf,
            host,
        })
    }
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
            let made = self.register_chunk(*job);
            let mut results = self.results.lock();
            match made {
                Ok(keys) => {
                    results.made[index] = Some(keys);
                    results.bytes += self.sources[job.region].chunks.bytes(job.chunk);
                    self.report(&mut results);
                }
                Err(error) => {
                    self.failed.store(true, Ordering::Relaxed);
                    results.error.get_or_insert(error);
                }
            }
        }
    }

    fn register_chunk(&self, job: Job) -> Result<ChunkKeys> {
        let source = &self.sources[job.region];
        let domain = &self.devices[job.device];
        let (start, length) = (source.chunks.start(job.chunk), source.chunks.bytes(job.chunk));
        let rights = rights(self.access, self.options.relaxed_ordering);
        let memory = source.register(domain, start, length, rights)?;
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
                Some(source.register(domain, start, length.min(PAGE_BYTES), readable)?)
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
    fn register(&self, domain: &ProtectionDomain, start: u64, length: u64, access: Access) -> Result<MemoryRegion> {
        let at = |error: VerbsError| error.in_place(&self.place);
        if let Some(dmabuf) = &self.dmabuf {
            let offset = dmabuf.offset + (start - self.chunks.base());
            match domain.register_dmabuf(dmabuf.fd.as_fd(), offset, length, start, access) {
                Err(error) if self.host && error.kind() == ErrorKind::Unsupported => {
                    tracing::info!(%error, place = self.place, "registering through the host's view");
                }
                result => return result.map_err(at),
            }
        }
        // SAFETY: the run lies inside the region, whose maker vouched that it stays mapped, readable and writable while
        // the region lives, and that nobody holds references into it; whoever holds the registration holds the region
        // (`RegionKeys`, then `Retired`, which drops it after the registration).
        unsafe { domain.register(start, length, access) }.map_err(at)
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

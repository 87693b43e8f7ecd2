//! Registration: a pool's regions on every device in use, and what peers need to reach them.
//!
//! * A region is registered in *chunks* of at most the smallest `max_mr_size` of the devices; all devices share the
//!   chunk edges, so that one look-up tells where a work request must be cut. Memory of several mappings has an edge at
//!   each: no registration crosses one.
//! * Memory that the host cannot see is offered as dmabufs first, then by its address, which a device takes if its driver
//!   knows the memory's driver (peer memory). If a device takes neither, the region goes through *staging* on all of them:
//!   peers are told that its owner copies. Each refusal is kept for people.
//! * Rights are the least that the pool's role needs. A pool that receives is writable by peers; only one that serves is
//!   readable. The flush after a fence reads the region on the device itself: a pool that only receives
//!   has a second registration of one page of each chunk for that, whose key no peer is told.
//! * Registrations live as long as somebody holds their [`RegionKeys`]: the pool by [`Registered::hold`], the engine
//!   while work requests name them. Giving them up is done by a thread of the registry (`kvx-dereg`), because it takes
//!   milliseconds per gibibyte: neither the caller who drops a pool nor the data thread that drops the last use waits.
//!   The regions' memory is let go of after that.

mod chunks;
mod keys;
mod register;
mod retire;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvxfer_core::memory::Region;
use kvxfer_core::transport::{RegionAccess, Registered};
use kvxfer_core::{Error, ErrorKind, Result};
use parking_lot::RwLock;

use chunks::Chunks;
pub use keys::{DEVICES_MAX, PAGE_BYTES, REGIONS_MAX, RemoteKey, RemoteRegions};
pub use register::RegistryOptions;

use crate::verbs::{MemoryRegion, ProtectionDomain};
use retire::Retirement;

/// The registrations of one endpoint. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Registry {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    devices: Vec<ProtectionDomain>,
    options: RegistryOptions,
    // By the region's address in this process, only to find the candidates: the entry's own `Arc` decides.
    regions: RwLock<HashMap<usize, Vec<Arc<RegionKeys>>>>,
    retirement: Retirement,
    // The number of the next registration.
    next: AtomicU64,
    // By number: what peers may have the owner copy out.
    served: RwLock<HashMap<u64, Weak<RegionKeys>>>,
}

/// One region, registered on every device. Keeps the registrations, and the region's memory.
#[derive(Debug)]
pub struct RegionKeys {
    // Its number, unique in the registry.
    id: u64,
    region: Arc<Region>,
    access: RegionAccess,
    reach: Reach,
    // Why it is not reached in a better way, for people; empty if it is.
    refusals: String,
    retirement: Retirement,
}

/// How devices get at a region.
#[derive(Debug)]
enum Reach {
    /// By themselves.
    Devices {
        chunks: Chunks,
        /// By device, then chunk.
        devices: Vec<Vec<ChunkKeys>>,
    },
    /// Not at all: its domain copies to and from memory that they have.
    Staging,
}

/// The registrations of one chunk on one device.
#[derive(Debug)]
struct ChunkKeys {
    lkey: u32,
    rkey: u32,
    flush_rkey: u32,
    memory: MemoryRegion,
    // For pools that peers may write but not read.
    flush: Option<MemoryRegion>,
}

/// How our own work requests name a run of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalKey {
    /// First byte, for a segment.
    pub address: u64,
    /// The registration's local key.
    pub lkey: u32,
    /// Bytes from there to the registration's edge: a segment must not go past it.
    pub until_edge: u64,
}

/// What a loopback read reads to flush writes to a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlushTarget {
    /// First byte. At least one byte may be read.
    pub address: u64,
    /// The key; never told to peers unless the pool serves.
    pub rkey: u32,
}

impl Registry {
    /// A registry for these devices. Their order is how keys are numbered: peers must know it.
    ///
    /// # Errors
    /// `InvalidArgument` for more than [`DEVICES_MAX`] devices, `ResourceExhausted` if its thread cannot start.
    pub fn new(devices: Vec<ProtectionDomain>, options: RegistryOptions) -> Result<Registry> {
        if devices.len() > DEVICES_MAX {
            return Err(
                Error::new(ErrorKind::InvalidArgument, format!("{} devices", devices.len()))
                    .because(format!("at most {DEVICES_MAX} can be used"))
                    .remedy("name the devices to use in rdma.devices"),
            );
        }
        Ok(Registry {
            inner: Arc::new(Inner {
                devices,
                options,
                regions: RwLock::new(HashMap::new()),
                retirement: Retirement::start()?,
                next: AtomicU64::new(1),
                served: RwLock::default(),
            }),
        })
    }

    /// The devices, in the order of their keys.
    pub fn devices(&self) -> &[ProtectionDomain] {
        &self.inner.devices
    }

    /// Registers the regions on every device, in parallel within the configured bound. Slow: pages are pinned.
    ///
    /// # Errors
    /// What a device refuses, with the limit and the need; `ResourceExhausted` if the keys are too many for a peer to be
    /// told. Nothing stays registered then. Memory that the host cannot see and that a device refuses is no error: it
    /// goes through staging, and [`Registered::notes`] says why.
    pub fn register(&self, regions: &[Arc<Region>], access: RegionAccess) -> Result<Registered> {
        let devices = &self.inner.devices;
        let registered = register::register(devices, &self.inner.options, regions, access)?;
        let made: Vec<Arc<RegionKeys>> = registered
            .into_iter()
            .map(|made| {
                Arc::new(RegionKeys {
                    id: self.inner.next.fetch_add(1, Ordering::Relaxed),
                    region: made.region,
                    access,
                    reach: made.reach,
                    refusals: made.refusals,
                    retirement: self.inner.retirement.clone(),
                })
            })
            .collect();
        let keys = keys::encode(devices.len(), &made, access)?;
        let notes = notes(&made);
        for note in &notes {
            tracing::info!(note, "registered");
        }
        let mut map = self.inner.regions.write();
        for entry in &made {
            map.entry(identity(&entry.region)).or_default().push(entry.clone());
        }
        drop(map);
        if access.serves {
            let mut served = self.inner.served.write();
            served.extend(made.iter().map(|keys| (keys.id, Arc::downgrade(keys))));
        }
        Ok(Registered {
            keys,
            notes,
            exported: Vec::new(),
            hold: Box::new(Hold {
                registry: Arc::downgrade(&self.inner),
                regions: made,
            }),
        })
    }

    /// The registration of exactly this region, if there is one. If it was registered more than once, one that the
    /// device may write locally comes first.
    pub fn local(&self, region: &Arc<Region>) -> Option<Arc<RegionKeys>> {
        let map = self.inner.regions.read();
        let entries = map.get(&identity(region))?.iter();
        entries
            .filter(|entry| Arc::ptr_eq(&entry.region, region))
            .max_by_key(|entry| entry.access.receives)
            .cloned()
    }

    /// The registration of that number, if peers may read it and its pool is in use.
    pub(crate) fn served(&self, id: u64) -> Option<Arc<RegionKeys>> {
        self.inner.served.read().get(&id)?.upgrade()
    }

    /// The registrations that peers may write. Whoever flushes a device holds them meanwhile, so that a pool that is
    /// given up in between does not take away the keys that are being read.
    pub fn written_by_peers(&self) -> Vec<Arc<RegionKeys>> {
        let map = self.inner.regions.read();
        let written = map.values().flatten().filter(|keys| keys.access.receives);
        written.cloned().collect()
    }

    /// The regions that are registered, each once for every pool that has it.
    pub fn regions(&self) -> Vec<Arc<Region>> {
        let map = self.inner.regions.read();
        map.values().flatten().map(|keys| keys.region.clone()).collect()
    }

    /// What registrations were refused, and what is done instead: for people.
    pub fn notes(&self) -> Vec<String> {
        let map = self.inner.regions.read();
        notes(map.values().flatten())
    }

    /// Regions that are registered and can be found.
    pub fn len(&self) -> usize {
        self.inner.regions.read().values().map(Vec::len).sum()
    }

    /// Whether no region is registered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Waits until everything that nobody uses any more is deregistered; `false` if that takes longer.
    pub fn wait_retired(&self, limit: Duration) -> bool {
        self.inner.retirement.wait(limit)
    }
}

impl RegionKeys {
    /// The region.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// What it is registered for.
    pub fn access(&self) -> RegionAccess {
        self.access
    }

    /// Whether no device was given it: what goes in and out is copied by its domain.
    pub fn is_staged(&self) -> bool {
        matches!(self.reach, Reach::Staging)
    }

    /// Which better ways of registering it were refused, and why; empty if none was.
    pub fn refusals(&self) -> &str {
        &self.refusals
    }

    /// Whether the processor can read it.
    pub fn is_visible(&self) -> bool {
        self.region.host_view(0, self.region.length()).is_some()
    }

    /// How our own work requests on device `device` name the bytes from `offset` on; `None` outside of the region, and
    /// for one that goes through staging.
    #[inline]
    pub fn local(&self, device: usize, offset: u64) -> Option<LocalKey> {
        let Reach::Devices { chunks, devices } = &self.reach else {
            return None;
        };
        let place = chunks.locate(offset)?;
        let chunk = devices.get(device)?.get(place.chunk)?;
        Some(LocalKey {
            address: place.address,
            lkey: chunk.lkey,
            until_edge: place.until_edge,
        })
    }

    /// What loopback reads on device `device` read to flush all writes to the region: one target per chunk. Empty
    /// for regions that no peer may write.
    pub fn flush_targets(&self, device: usize) -> impl Iterator<Item = FlushTarget> + '_ {
        let registered = match &self.reach {
            Reach::Devices { chunks, devices } => devices.get(device).map(|keys| (chunks, keys)),
            Reach::Staging => None,
        };
        registered
            .filter(|_| self.access.receives)
            .into_iter()
            .flat_map(|(chunks, keys)| {
                keys.iter().enumerate().map(|(index, chunk)| FlushTarget {
                    address: chunks.start(index),
                    rkey: chunk.flush_rkey,
                })
            })
    }
}

/// One line for all regions of a kind that were refused the same.
fn notes<'a>(regions: impl IntoIterator<Item = &'a Arc<RegionKeys>>) -> Vec<String> {
    let mut kinds: BTreeMap<(&str, bool, &str), usize> = BTreeMap::new();
    for keys in regions {
        if !keys.refusals.is_empty() {
            let kind = (keys.region.domain().name(), keys.is_staged(), keys.refusals.as_str());
            *kinds.entry(kind).or_default() += 1;
        }
    }
    let line = |((domain, staged, refusals), count): ((&str, bool, &str), usize)| {
        let regions = if count == 1 { "1 region" } else { "regions" };
        let count = if count == 1 { String::new() } else { format!("{count} ") };
        match staged {
            true => format!("{domain} memory ({count}{regions}) goes through staging: {refusals}"),
            false => format!("{domain} memory ({count}{regions}) is registered in another way: {refusals}"),
        }
    };
    kinds.into_iter().map(line).collect()
}

impl Drop for RegionKeys {
    fn drop(&mut self) {
        let Reach::Devices { devices, .. } = &mut self.reach else {
            return;
        };
        let memory = devices.drain(..).flatten().flat_map(|chunk| {
            let ChunkKeys { memory, flush, .. } = chunk;
            [Some(memory), flush].into_iter().flatten()
        });
        self.retirement.retire(memory.collect(), self.region.clone());
    }
}

/// A pool's claim on its registrations.
struct Hold {
    registry: Weak<Inner>,
    regions: Vec<Arc<RegionKeys>>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        let Some(registry) = self.registry.upgrade() else {
            return;
        };
        let mut served = registry.served.write();
        for mine in &self.regions {
            served.remove(&mine.id);
        }
        drop(served);
        let mut map = registry.regions.write();
        for mine in &self.regions {
            let key = identity(&mine.region);
            if let Some(entries) = map.get_mut(&key) {
                entries.retain(|entry| !Arc::ptr_eq(entry, mine));
                if entries.is_empty() {
                    map.remove(&key);
                }
            }
        }
    }
}

fn identity(region: &Arc<Region>) -> usize {
    Arc::as_ptr(region).addr()
}

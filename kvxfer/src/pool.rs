//! Pools: registered memory with a layout.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use kvxfer_core::layout::{BlockId, PoolLayout};
use kvxfer_core::machine::{HandleId, PoolSetup};
use kvxfer_core::memory::Region;
use kvxfer_core::plan::Target;
use kvxfer_core::transport::RegionAccess;
use kvxfer_core::wire::Access;
use kvxfer_core::{Error, ErrorKind, PoolId, Result};
use kvxfer_cuda::PointerKind;

use crate::completion::Completion;
use crate::control::{Shared, State};
use crate::handle::{Core, Entry, GrantEvents, GrantHandle, GrantWatcher, HandleKind, Sink};
use crate::options::GrantOptions;
use crate::transports::PoolRegistration;

/// What peers may do with a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Be sent its blocks (offers, pushes from it, grants to read).
    Serve,
    /// Write into its blocks where a claim or grant says so.
    Receive,
    /// Both.
    Both,
}

impl Role {
    pub(crate) fn serves(self) -> bool {
        matches!(self, Role::Serve | Role::Both)
    }

    pub(crate) fn receives(self) -> bool {
        matches!(self, Role::Receive | Role::Both)
    }
}

/// Memory with a layout, known to the endpoint's transports and told to its peers.
///
/// Clones are the same pool. Dropping the last one never blocks and never takes memory from under a transfer: the pool
/// goes once nothing refers to it.
#[derive(Clone)]
pub struct Pool {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) shared: Arc<Shared>,
    pub(crate) layout: Arc<PoolLayout>,
    regions: Arc<[Arc<Region>]>,
    role: Role,
    presence: Mutex<Presence>,
}

/// Whether the control plane knows the pool, and under which number.
enum Presence {
    /// The registration is given up after the control plane has forgotten the pool.
    Active(PoolId, PoolRegistration),
    /// Out of use, but others on this host have not let go of its memory yet.
    Leaving(PoolRegistration, After),
    Left(After),
}

/// What a pool that is out of use may become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    Suspended,
    Closed,
}

impl Pool {
    pub(crate) fn register(
        shared: &Arc<Shared>,
        layout: PoolLayout,
        regions: Vec<Arc<Region>>,
        role: Role,
    ) -> Result<Pool> {
        check_regions(&layout, &regions)?;
        let inner = Inner {
            shared: Arc::clone(shared),
            layout: Arc::new(layout),
            regions: regions.into(),
            role,
            presence: Mutex::new(Presence::Left(After::Suspended)),
        };
        inner.add()?;
        Ok(Pool { inner: Arc::new(inner) })
    }

    /// The layout.
    pub fn layout(&self) -> &Arc<PoolLayout> {
        &self.inner.layout
    }

    /// The memory: one region for each that the layout declares.
    pub fn regions(&self) -> &[Arc<Region>] {
        &self.inner.regions
    }

    /// What peers may do with it.
    pub fn role(&self) -> Role {
        self.inner.role
    }

    /// Copies bytes into a block of a plane, from `offset` bytes on. What a transfer that is under way to the same
    /// bytes leaves there is undefined.
    ///
    /// # Errors
    /// `OutOfBounds` naming what does not exist.
    pub fn copy_in(&self, plane: u32, block: BlockId, offset: u32, bytes: &[u8]) -> Result<()> {
        let (region, start) = self.locate(plane, block, offset, bytes.len())?;
        region.copy_in(start, bytes)
    }

    /// Copies bytes of a block of a plane out, from `offset` bytes on.
    ///
    /// # Errors
    /// `OutOfBounds` naming what does not exist.
    pub fn copy_out(&self, plane: u32, block: BlockId, offset: u32, bytes: &mut [u8]) -> Result<()> {
        let (region, start) = self.locate(plane, block, offset, bytes.len())?;
        region.copy_out(start, bytes)
    }

    /// Permits a peer to write exactly these blocks, once.
    ///
    /// # Errors
    /// `InvalidArgument` and `OutOfBounds` for a target that does not fit the pool; `Busy` without a free slot;
    /// `Unsupported` if the pool's role does not receive.
    pub fn grant(&self, target: impl Into<Target>, options: GrantOptions) -> Result<GrantHandle> {
        self.open(Access::Write, target.into(), &options)
    }

    /// Permits a peer to read exactly these blocks, once. They must hold until the handle has ended.
    ///
    /// # Errors
    /// As [`grant`](Self::grant), for a pool that serves.
    pub fn serve(&self, target: impl Into<Target>, options: GrantOptions) -> Result<GrantHandle> {
        self.open(Access::Read, target.into(), &options)
    }

    /// Takes the pool out of use. Its memory is free after that.
    ///
    /// # Errors
    /// `Busy` while a handle or a kept verdict refers to it; it stays usable then. `Busy`, with their number, while other
    /// endpoints on this host have its memory mapped: it is out of use then, they have been told to let go, and the
    /// memory must stay until another call says `Ok`. (They let go within milliseconds, when their copies are over; a
    /// process that is stopped does not.)
    pub fn close(&self) -> Result<()> {
        self.inner.remove(After::Closed)
    }

    /// As [`close`](Self::close), waiting up to `timeout` for what refers to the pool to end, and for others to let go of its
    /// memory.
    ///
    /// # Errors
    /// `Busy` if something still does.
    pub fn close_wait(&self, timeout: Duration) -> Result<()> {
        let began = Instant::now();
        loop {
            match self.close() {
                // Counted from the beginning: an end could lie beyond what the clock can say.
                Err(error) if error.kind() == ErrorKind::Busy && began.elapsed() < timeout => {
                    let left = timeout.saturating_sub(began.elapsed());
                    // Asked again when anything ends, and at least every few milliseconds.
                    self.inner.shared.pause(left.min(Duration::from_millis(5)));
                }
                result => return result,
            }
        }
    }

    /// Takes the pool out of use for a while, so that the engine may remap its memory: until
    /// [`resume`](Self::resume) nothing of it is read or written, and peers do not see it.
    ///
    /// # Errors
    /// `Busy` while a handle refers to it, and while other endpoints on this host have its memory mapped, as with
    /// [`close`](Self::close): call it again then. `Closed` if it is closed.
    pub fn suspend(&self) -> Result<()> {
        self.inner.remove(After::Suspended)
    }

    /// Puts a suspended pool into use again, with the same layout at the same addresses.
    ///
    /// # Errors
    /// `Closed` if it is closed; what registering can refuse.
    pub fn resume(&self) -> Result<()> {
        self.inner.add()
    }

    /// The pool's number, as peers know it.
    ///
    /// # Errors
    /// `NotRegistered` while it is suspended, `Closed` after its end.
    pub fn id(&self) -> Result<PoolId> {
        self.inner.id()
    }

    fn open(&self, access: Access, target: Target, options: &GrantOptions) -> Result<GrantHandle> {
        let inner = &self.inner;
        let shared = &inner.shared;
        let pool = inner.id()?;
        let bytes = target.bytes(&inner.layout)?;
        let (completion, completer) = Completion::new(None);
        let events = options.events.map(|data| shared.events.reserve(data));
        let told_id: Option<Arc<OnceLock<HandleId>>> = events.as_ref().map(|_| Arc::default());
        let watcher = GrantWatcher {
            completer: completer.clone(),
            bytes,
            events: events.as_ref().zip(told_id.as_ref()).map(|(source, id)| GrantEvents {
                queue: Arc::clone(&shared.events),
                source: Arc::clone(source),
                id: Arc::clone(id),
            }),
        };
        // Only a write ends at the last byte; a read ends when its reader has had it validated.
        let watcher = match access {
            Access::Write => Some(Arc::new(watcher) as _),
            Access::Read => None,
        };
        let opened = shared.begin(|state: &mut State, now| {
            let options = options.machine();
            let (id, grant) = state.machine.grant(now, pool, access, target, options, watcher)?;
            if let Some(told) = &told_id {
                let _ = told.set(id);
            }
            state.handles.insert(
                id,
                Entry {
                    kind: HandleKind::Grant,
                    sink: Sink::Arrival(completer),
                    events: events.clone(),
                    _waiting: None,
                    streams: Vec::new(),
                    opened: now,
                },
            );
            Ok((id, grant))
        });
        let (id, grant) = opened.inspect_err(|_| {
            if events.is_some() {
                shared.events.unreserve();
            }
        })?;
        shared.metrics.handle_opened(HandleKind::Grant);
        Ok(GrantHandle::new(Core::new(Arc::clone(shared), id, completion), grant))
    }

    fn locate(&self, plane: u32, block: BlockId, offset: u32, length: usize) -> Result<(&Arc<Region>, u64)> {
        locate(&self.inner.layout, &self.inner.regions, plane, block, offset, length)
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let id = self.inner.id().ok();
        write!(f, "Pool({id:?}, {:?})", self.inner.role)
    }
}

impl Inner {
    pub(crate) fn id(&self) -> Result<PoolId> {
        match &*self.presence.lock() {
            Presence::Active(id, _) => Ok(*id),
            Presence::Leaving(_, After::Suspended) | Presence::Left(After::Suspended) => {
                Err(Error::new(ErrorKind::NotRegistered, "the pool is suspended")
                    .remedy("call Pool::resume before using it"))
            }
            Presence::Leaving(_, After::Closed) | Presence::Left(After::Closed) => Err(closed()),
        }
    }

    fn add(&self) -> Result<()> {
        let mut presence = self.presence.lock();
        match &*presence {
            Presence::Active(..) => Ok(()),
            Presence::Leaving(_, After::Closed) | Presence::Left(After::Closed) => Err(closed()),
            Presence::Leaving(_, After::Suspended) | Presence::Left(After::Suspended) => {
                // Given up first: what was recalled is exported anew.
                let before = std::mem::replace(&mut *presence, Presence::Left(After::Suspended));
                let mapped = match before {
                    Presence::Leaving(registration, _) => registration.exported.clone(),
                    _ => Vec::new(),
                };
                match self.enter() {
                    Ok(mut active) => {
                        // What others have not let go of yet counts until they have.
                        if let Presence::Active(_, registration) = &mut active {
                            let still = mapped.into_iter().filter(|exported| exported.importers() > 0);
                            registration.exported.extend(still);
                        }
                        *presence = active;
                    }
                    Err(error) => {
                        *presence = Presence::Leaving(PoolRegistration::of_left_over(mapped), After::Suspended);
                        return Err(error);
                    }
                }
                Ok(())
            }
        }
    }

    /// Registers the memory with the transports, and the pool with the control plane.
    fn enter(&self) -> Result<Presence> {
        let (serves, receives) = (self.role.serves(), self.role.receives());
        let access = RegionAccess { serves, receives };
        check_kinds(&self.shared, &self.regions)?;
        let mut registration = self.shared.transports.register(&self.regions, access)?;
        let setup = PoolSetup {
            layout: Arc::clone(&self.layout),
            regions: Arc::clone(&self.regions),
            serves,
            receives,
            keys: std::mem::take(&mut registration.keys),
        };
        let id = self.shared.begin(|state, now| {
            let id = self.shared.next_pool(state);
            state.machine.add_pool(now, id, setup)?;
            Ok(id)
        })?;
        Ok(Presence::Active(id, registration))
    }

    fn remove(&self, into: After) -> Result<()> {
        let mut presence = self.presence.lock();
        match &*presence {
            Presence::Active(id, _) => {
                self.shared.call(|state, now| state.machine.remove_pool(now, *id))?;
            }
            Presence::Leaving(_, After::Closed) | Presence::Left(After::Closed) if into == After::Suspended => {
                return Err(closed());
            }
            Presence::Leaving(..) | Presence::Left(_) => {}
        }
        let registration = match std::mem::replace(&mut *presence, Presence::Left(into)) {
            Presence::Active(_, registration) => {
                registration.exported.iter().for_each(|exported| exported.recall());
                registration
            }
            Presence::Leaving(registration, _) => registration,
            Presence::Left(_) => return Ok(()),
        };
        let importers: usize = registration.exported.iter().map(|exported| exported.importers()).sum();
        if importers > 0 {
            *presence = Presence::Leaving(registration, into);
            return Err(mapped(importers));
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let presence = std::mem::replace(self.presence.get_mut(), Presence::Left(After::Closed));
        if let Presence::Active(id, registration) = presence {
            self.shared.call(|state, now| {
                if state.machine.remove_pool(now, id).is_err() {
                    state.orphans.push((id, registration));
                }
            });
        }
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the pool is closed").remedy("register the memory again")
}

/// Others have let go of nothing yet.
fn mapped(importers: usize) -> Error {
    let (who, have) = match importers {
        1 => ("another endpoint on this host".to_owned(), "has"),
        more => (format!("other endpoints on this host ({more} mappings)"), "have"),
    };
    Error::new(ErrorKind::Busy, "the pool is out of use, but its memory is not free yet")
        .because(format!("{who} {have} it mapped, and {have} been told to let go"))
        .remedy("keep the memory, and call again until it is Ok (or Pool::close_wait once); see that no process of theirs is stopped")
}

/// Whether the memory given is what the layout declares.
fn check_regions(layout: &PoolLayout, regions: &[Arc<Region>]) -> Result<()> {
    let declared = layout.region_lengths();
    if declared.len() != regions.len() {
        return Err(
            Error::new(ErrorKind::InvalidArgument, format!("{} regions", regions.len()))
                .because(format!("the layout declares {}", declared.len()))
                .remedy("pass one region for each that the layout declares, in its order"),
        );
    }
    for (index, (region, &length)) in regions.iter().zip(declared).enumerate() {
        if region.length() < length {
            return Err(Error::new(
                ErrorKind::OutOfBounds,
                format!("region {index} of {} bytes", region.length()),
            )
            .because(format!("the layout declares {length} bytes"))
            .remedy("pass at least as much memory as the layout declares"));
        }
    }
    Ok(())
}

/// Whether what is declared as host memory is: the driver, if it is in use, knows its devices' addresses. Read by the
/// CPU they would end the process. (The reverse is refused where the region is made.)
fn check_kinds(shared: &Shared, regions: &[Arc<Region>]) -> Result<()> {
    let Some(cuda) = shared.loaded_cuda() else {
        return Ok(());
    };
    for (index, region) in regions.iter().enumerate() {
        if region.length() == 0 || region.host_view(0, 1).is_none() {
            continue;
        }
        let address = region.address();
        // A driver that cannot say has nothing against it: pools in host memory outlive it.
        let kind = cuda.classify(address).map(|pointer| pointer.kind);
        if let Ok(PointerKind::Device { pci, .. }) = kind {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("region {index}, {} bytes at {address:#x}", region.length()),
            )
            .because(format!(
                "it is declared as host memory, and is memory of the CUDA device {pci}"
            ))
            .remedy("declare it as CUDA memory: make its region with Endpoint::cuda"));
        }
    }
    Ok(())
}

fn locate<'a>(
    layout: &PoolLayout,
    regions: &'a [Arc<Region>],
    plane: u32,
    block: BlockId,
    offset: u32,
    length: usize,
) -> Result<(&'a Arc<Region>, u64)> {
    let (region, start) = layout.plane_offset(plane as usize, block)?;
    let block_length = layout.planes()[plane as usize].block_length;
    if u64::from(offset) + length as u64 > block_length {
        return Err(
            Error::new(ErrorKind::OutOfBounds, format!("{length} bytes at offset {offset}"))
                .at(format!("plane {plane}, block {block}"))
                .because(format!("its blocks have {block_length} bytes"))
                .remedy("keep offset plus length inside the block"),
        );
    }
    let region = regions.get(region as usize).ok_or_else(|| {
        Error::new(ErrorKind::Internal, format!("plane {plane} lies in region {region}")).because("there is none")
    })?;
    Ok((region, start + u64::from(offset)))
}

//! The owner's side: which regions others may map, who has them mapped, and what they are told.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvxfer_core::ErrorKind;
use kvxfer_core::memory::{Exported, Region};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::channel::{self, Wake};
use super::handles::{self, Handle};
use super::server;
use super::wire::{Description, MAPPINGS_MAX, Token};
use crate::context::Primary;
use crate::error::CudaError;
use crate::pointer::{self, Extent, Mapping};

/// The thread's name.
const THREAD: &str = "kvx-share";
/// Exports at once. Each layer of each pool may be a region.
const EXPORTS_MAX: usize = 1 << 16;
/// How long the end waits for importers.
const END_WAIT: Duration = Duration::from_secs(2);

/// What a [`Cuda`](crate::Cuda) lets others map. Its socket and its thread are made with the first export.
#[derive(Debug)]
pub(crate) struct Exporter {
    pub(super) state: Mutex<State>,
    wake: OnceLock<Wake>,
    over: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) exports: HashMap<Token, Arc<Entry>>,
    name: Token,
    thread: Option<JoinHandle<()>>,
    /// Nothing is exported any more, and the thread ends with the last importer.
    pub(super) closing: bool,
    ended: bool,
}

/// A region that others may map.
#[derive(Debug)]
pub(super) struct Entry {
    token: Token,
    pub(super) source: Source,
    /// Importers that have it mapped, or may have. Changed under the state's lock only.
    importers: AtomicUsize,
    /// What changes under the state's lock: whether it is given to nobody any more, and the region until nobody has it.
    kept: Mutex<Kept>,
}

#[derive(Debug)]
struct Kept {
    recalled: bool,
    region: Option<Arc<Region>>,
}

/// What is known of the memory.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) primary: Arc<Primary>,
    /// The device's PCI address.
    pub(super) device: String,
    pub(super) address: u64,
    pub(super) length: u64,
    /// Where in the first mapping the region begins.
    pub(super) head: u64,
    pub(super) memory: Memory,
}

#[derive(Debug)]
pub(super) enum Memory {
    Allocation { handle: Handle, length: u64 },
    Mappings(Vec<Extent>),
}

impl Source {
    /// What a region's memory is handed over by.
    ///
    /// # Errors
    /// Memory that the driver hands to no other process, with the reason.
    pub(super) fn of(
        primary: &Arc<Primary>,
        device: &str,
        (address, length): (u64, u64),
        mappings: &[Mapping],
    ) -> Result<Source, CudaError> {
        let unfit = |kind, why: String, remedy| CudaError::Unfit {
            kind,
            what: format!("{} of cuda:{device} cannot be shared", pointer::show(address, length)),
            why,
            remedy,
        };
        let memory = match mappings {
            [one] if !one.vmm => {
                let handle = handles::allocation_handle(primary, one.extent.base).map_err(|refused| {
                    unfit(
                        ErrorKind::Unsupported,
                        format!("the driver gives no handle of its allocation ({refused}): memory of a pool has none"),
                        "allocate it with cudaMalloc, or map it with descriptors as its handles' type",
                    )
                })?;
                Memory::Allocation {
                    handle,
                    length: one.extent.length,
                }
            }
            mappings if mappings.len() > MAPPINGS_MAX as usize => {
                let why = format!(
                    "it has {} mappings, and {MAPPINGS_MAX} are handed over at most",
                    mappings.len()
                );
                return Err(unfit(ErrorKind::Unsupported, why, "map it in larger pieces"));
            }
            mappings => {
                if let Some(one) = mappings.iter().find(|mapping| !mapping.shareable) {
                    return Err(unfit(
                        ErrorKind::Unsupported,
                        format!(
                            "the mapping at {:#x} was made without descriptors as its handles' type",
                            one.extent.base
                        ),
                        "make the memory with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
                    ));
                }
                Memory::Mappings(mappings.iter().map(|mapping| mapping.extent).collect())
            }
        };
        Ok(Source {
            primary: Arc::clone(primary),
            device: device.to_owned(),
            address,
            length,
            head: address - mappings.first().map_or(address, |mapping| mapping.extent.base),
            memory,
        })
    }
}

impl Entry {
    pub(super) fn importers(&self) -> usize {
        self.importers.load(Ordering::Acquire)
    }

    /// An importer more, if it is given to any.
    pub(super) fn give(&self, _: &mut MutexGuard<'_, State>) -> bool {
        let given = !self.kept.lock().recalled;
        if given {
            self.importers.fetch_add(1, Ordering::AcqRel);
        }
        given
    }

    pub(super) fn is_recalled(&self) -> bool {
        self.kept.lock().recalled
    }

    /// An importer less. What is returned is to be dropped without the lock: it may run anything.
    #[must_use]
    pub(super) fn take_back(&self, state: &mut MutexGuard<'_, State>) -> Option<Arc<Region>> {
        self.importers.fetch_sub(1, Ordering::AcqRel);
        self.forget(state)
    }

    /// The region, once it is recalled and nobody has it.
    fn forget(&self, state: &mut MutexGuard<'_, State>) -> Option<Arc<Region>> {
        let mut kept = self.kept.lock();
        if !kept.recalled || self.importers() > 0 {
            return None;
        }
        state.exports.remove(&self.token);
        kept.region.take()
    }
}

impl Exporter {
    pub(super) fn new() -> Arc<Exporter> {
        Arc::new(Exporter {
            state: Mutex::default(),
            wake: OnceLock::new(),
            over: Condvar::new(),
        })
    }

    /// Lets others map a region.
    pub(super) fn export(self: &Arc<Exporter>, region: &Arc<Region>, source: Source) -> Result<Arc<Export>, CudaError> {
        let mut state = self.state.lock();
        if state.closing {
            return Err(CudaError::Closed);
        }
        if state.exports.len() >= EXPORTS_MAX {
            return Err(CudaError::Limit {
                what: "shared regions",
                limit: EXPORTS_MAX,
            });
        }
        let failed = |errno: rustix::io::Errno| CudaError::Thread {
            name: THREAD.into(),
            why: errno.to_string(),
        };
        self.start(&mut state)?;
        let token = channel::random().map_err(failed)?;
        let entry = Arc::new(Entry {
            token,
            importers: AtomicUsize::new(0),
            kept: Mutex::new(Kept {
                recalled: false,
                region: Some(Arc::clone(region)),
            }),
            source,
        });
        let description = Description::new(state.name, token, region.length()).encode();
        state.exports.insert(token, Arc::clone(&entry));
        Ok(Arc::new(Export {
            exporter: Arc::clone(self),
            entry,
            description,
        }))
    }

    fn start(self: &Arc<Exporter>, state: &mut MutexGuard<'_, State>) -> Result<(), CudaError> {
        if state.thread.is_some() {
            return Ok(());
        }
        let failed = |why: String| CudaError::Thread {
            name: THREAD.into(),
            why,
        };
        let errno = |errno: rustix::io::Errno| failed(errno.to_string());
        if self.wake.get().is_none() {
            let wake = Wake::new().map_err(errno)?;
            // Set under the lock only.
            let _ = self.wake.set(wake);
        }
        let name = channel::random().map_err(errno)?;
        let listener = channel::listen_at(&name).map_err(errno)?;
        let exporter = Arc::clone(self);
        let started = std::thread::Builder::new().name(THREAD.into()).spawn(move || {
            server::run(&exporter, listener);
            exporter.state.lock().ended = true;
            exporter.over.notify_all();
        });
        state.thread = Some(started.map_err(|error| failed(error.to_string()))?);
        state.name = name;
        Ok(())
    }

    /// What the thread is woken by. There is one once it runs.
    pub(super) fn wake(&self) -> Option<&Wake> {
        self.wake.get()
    }

    fn wake_thread(&self) {
        if let Some(wake) = self.wake.get() {
            wake.wake();
        }
    }

    /// Gives it to nobody any more, and has the importers let go.
    fn recall(&self, entry: &Entry) {
        let mut state = self.state.lock();
        entry.kept.lock().recalled = true;
        let region = entry.forget(&mut state);
        drop(state);
        match region {
            Some(region) => drop(region),
            None => self.wake_thread(),
        }
    }

    /// Regions that others may map now, and importers that have one mapped.
    pub(super) fn counts(&self) -> (usize, usize) {
        let state = self.state.lock();
        let importers = state.exports.values().map(|entry| entry.importers()).sum();
        (state.exports.len(), importers)
    }

    /// Recalls everything, and waits a while for the importers. Whoever has not let go by then keeps the memory: the thread is
    /// left to wait for them.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closing = true;
        let all: Vec<Arc<Entry>> = state.exports.values().cloned().collect();
        let free: Vec<_> = all
            .iter()
            .filter_map(|entry| {
                entry.kept.lock().recalled = true;
                entry.forget(&mut state)
            })
            .collect();
        let thread = state.thread.take();
        drop(state);
        drop(free);
        self.wake_thread();
        // What a region keeps may be what holds the last of this; then it goes on the thread itself.
        let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) else {
            return;
        };
        let mut state = self.state.lock();
        let deadline = Instant::now() + END_WAIT;
        while !state.ended && !self.over.wait_until(&mut state, deadline).timed_out() {}
        let (ended, left) = (state.ended, state.exports.len());
        drop(state);
        if ended {
            // Its last steps wait for nothing.
            let _ = thread.join();
        } else {
            tracing::warn!(
                regions = left,
                "other endpoints on this host still have memory mapped; it is kept until they let go of it"
            );
        }
    }
}

/// A region that others may map, until this is dropped.
pub(super) struct Export {
    exporter: Arc<Exporter>,
    entry: Arc<Entry>,
    description: Vec<u8>,
}

impl Exported for Export {
    fn description(&self) -> &[u8] {
        &self.description
    }

    fn recall(&self) {
        self.exporter.recall(&self.entry);
    }

    fn importers(&self) -> usize {
        self.entry.importers()
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.exporter.recall(&self.entry);
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = &self.entry.source;
        let importers = self.entry.importers();
        write!(
            f,
            "Export({}, {importers} importers)",
            pointer::show(source.address, source.length)
        )
    }
}

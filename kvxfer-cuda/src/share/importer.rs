//! The importer's side: what others let us map, for the devices that are to copy out of it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvxfer_core::memory::{ImportState, Imported};
use kvxfer_core::{Error, ErrorKind};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::channel::Wake;
use super::client;
use super::wire::Description;
use crate::context::Primary;
use crate::error::CudaError;
use crate::probe::DeviceFacts;

/// The thread's name.
const THREAD: &str = "kvx-import";
/// Imports at once.
const IMPORTS_MAX: usize = 1 << 16;
/// Refusals that are remembered for people.
const NOTES_MAX: usize = 16;
/// How long the end waits for what is mapped to be unmapped.
const END_WAIT: Duration = Duration::from_secs(2);

/// What a [`Cuda`](crate::Cuda) maps of others' memory. Its thread starts with the first import, and ends with this.
#[derive(Debug)]
pub(crate) struct Importer {
    shared: Arc<Shared>,
}

/// What the thread and the imports share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) devices: Vec<DeviceFacts>,
    state: Mutex<State>,
    wake: OnceLock<Wake>,
    over: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// By device and description.
    known: HashMap<(i32, Vec<u8>), Weak<Import>>,
    new: Vec<Arc<Core>>,
    thread: Option<JoinHandle<()>>,
    closing: bool,
    ended: bool,
    notes: Vec<String>,
}

/// For which device something is imported.
#[derive(Debug, Clone)]
pub(super) struct Destination {
    pub(super) primary: Arc<Primary>,
    pub(super) ordinal: i32,
    /// Its PCI address.
    pub(super) pci: String,
}

/// Another's region, as its users see it. The mapping goes once this is dropped and the copies are over.
pub(super) struct Import {
    core: Arc<Core>,
}

/// Another's region, as the thread sees it.
#[derive(Debug)]
pub(super) struct Core {
    shared: Arc<Shared>,
    pub(super) destination: Destination,
    pub(super) description: Description,
    status: Mutex<Status>,
}

#[derive(Debug)]
struct Status {
    step: Step,
    /// Copies under way.
    uses: usize,
    dropped: bool,
}

#[derive(Debug)]
enum Step {
    Pending,
    /// Where the region begins, for the device.
    Ready(u64),
    Gone(Error),
}

/// Keeps an import mapped while a copy of it is under way.
pub(crate) struct Use {
    core: Arc<Core>,
    address: u64,
}

impl Importer {
    pub(super) fn new(devices: Vec<DeviceFacts>) -> Importer {
        Importer {
            shared: Arc::new(Shared {
                devices,
                state: Mutex::default(),
                wake: OnceLock::new(),
                over: Condvar::new(),
            }),
        }
    }

    /// Begins to import, unless it is imported for that device already.
    pub(super) fn import(&self, destination: Destination, bytes: &[u8]) -> Arc<Import> {
        let shared = &self.shared;
        let (description, refused) = match Description::decode(bytes) {
            Some(description) => (description, None),
            None => {
                let error = gone(
                    ErrorKind::InvalidArgument,
                    &destination.pci,
                    "its description is of another version of kvxfer, or none at all",
                )
                .remedy("use the same version of kvxfer on both sides");
                (Description::new([0; 16], [0; 16], 1), Some(error))
            }
        };
        let key = (destination.ordinal, bytes.to_vec());
        let mut state = shared.state.lock();
        state.known.retain(|_, known| known.strong_count() > 0);
        if let Some(known) = state.known.get(&key).and_then(Weak::upgrade)
            && !known.core.is_gone()
        {
            return known;
        }
        let core = Arc::new(Core {
            shared: Arc::clone(shared),
            destination,
            description,
            status: Mutex::new(Status {
                step: Step::Pending,
                uses: 0,
                dropped: false,
            }),
        });
        let import = Arc::new(Import {
            core: Arc::clone(&core),
        });
        let started = match refused {
            Some(error) => Err(error),
            None => shared.start(&mut state).map_err(Error::from),
        };
        match started {
            Ok(()) => {
                state.known.insert(key, Arc::downgrade(&import));
                state.new.push(core);
                drop(state);
                shared.wake_thread();
            }
            Err(error) => {
                state.note(&core.destination.pci, &error);
                core.status.lock().step = Step::Gone(error);
            }
        }
        import
    }

    /// Why something was not imported, a line for each.
    pub(super) fn notes(&self) -> Vec<String> {
        self.shared.state.lock().notes.clone()
    }

    /// Imports that somebody has.
    pub(super) fn count(&self) -> usize {
        let state = self.shared.state.lock();
        state.known.values().filter(|known| known.strong_count() > 0).count()
    }
}

impl Drop for Importer {
    /// Waits a while until everything is unmapped: nobody is left who could start a copy of it.
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.closing = true;
        let Some(thread) = state.thread.take() else { return };
        self.shared.wake_thread();
        let deadline = Instant::now() + END_WAIT;
        while !state.ended && !self.shared.over.wait_until(&mut state, deadline).timed_out() {}
        let ended = state.ended;
        drop(state);
        if ended {
            // Its last steps wait for nothing.
            let _ = thread.join();
        } else {
            tracing::warn!("other endpoints' memory is still mapped; it is left to its thread");
        }
    }
}

impl Shared {
    fn start(self: &Arc<Shared>, state: &mut MutexGuard<'_, State>) -> Result<(), CudaError> {
        if state.closing {
            return Err(CudaError::Closed);
        }
        if state.known.len() >= IMPORTS_MAX {
            return Err(CudaError::Limit {
                what: "imported regions",
                limit: IMPORTS_MAX,
            });
        }
        if state.thread.is_some() {
            return Ok(());
        }
        let failed = |why: String| CudaError::Thread {
            name: THREAD.into(),
            why,
        };
        if self.wake.get().is_none() {
            let wake = Wake::new().map_err(|errno| failed(errno.to_string()))?;
            // Set under the lock only.
            let _ = self.wake.set(wake);
        }
        let shared = Arc::clone(self);
        let started = std::thread::Builder::new().name(THREAD.into()).spawn(move || {
            client::run(&shared);
            shared.state.lock().ended = true;
            shared.over.notify_all();
        });
        state.thread = Some(started.map_err(|error| failed(error.to_string()))?);
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

    /// What is to be imported and has not been begun, and whether it is the last.
    pub(super) fn take_new(&self) -> (Vec<Arc<Core>>, bool) {
        let mut state = self.state.lock();
        (std::mem::take(&mut state.new), state.closing)
    }
}

impl State {
    fn note(&mut self, device: &str, error: &Error) {
        let note = format!("cuda:{device}: not copied directly: {error}");
        if self.notes.len() < NOTES_MAX && !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }
}

/// Why something is not imported.
pub(super) fn gone(kind: ErrorKind, device: &str, why: impl Into<String>) -> Error {
    Error::new(kind, "memory of another endpoint on this host")
        .at(format!("cuda:{device}"))
        .because(why)
}

impl Core {
    fn is_gone(&self) -> bool {
        matches!(self.status.lock().step, Step::Gone(_))
    }

    /// Copies may be started: the region begins at this address.
    pub(super) fn ready(&self, address: u64) {
        self.status.lock().step = Step::Ready(address);
    }

    /// No copy is started any more. The first reason is kept.
    pub(super) fn end(&self, error: Error) {
        let mut status = self.status.lock();
        let (was_pending, dropped) = match status.step {
            Step::Gone(_) => return,
            Step::Ready(_) => (false, status.dropped),
            Step::Pending => (true, status.dropped),
        };
        status.step = Step::Gone(error.clone());
        drop(status);
        // Nobody is told of what nobody wants any more.
        if was_pending && !dropped {
            tracing::info!(%error, "not imported");
            self.shared.state.lock().note(&self.destination.pci, &error);
        }
    }

    /// Whether it is to be let go of, and no copy of it is under way.
    pub(super) fn is_over(&self) -> bool {
        let status = self.status.lock();
        status.uses == 0 && (status.dropped || matches!(status.step, Step::Gone(_)))
    }

    fn begin(self: &Arc<Core>) -> Result<Use, Error> {
        let mut status = self.status.lock();
        match &status.step {
            Step::Ready(address) => {
                let address = *address;
                status.uses += 1;
                Ok(Use {
                    core: Arc::clone(self),
                    address,
                })
            }
            Step::Gone(error) => Err(error.clone()),
            Step::Pending => Err(gone(ErrorKind::Busy, &self.destination.pci, "it is not mapped yet")
                .remedy("wait until its state is Ready")),
        }
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut status = self.core.status.lock();
        status.uses -= 1;
        let last = status.uses == 0 && (status.dropped || matches!(status.step, Step::Gone(_)));
        drop(status);
        if last {
            self.core.shared.wake_thread();
        }
    }
}

impl Use {
    /// Where the region begins, for the device.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Import {
    /// Keeps it mapped, for a copy of the device with this number and of this driver.
    pub(super) fn begin(&self, importer: &Importer, ordinal: i32) -> Result<Use, Error> {
        if !Arc::ptr_eq(&self.core.shared, &importer.shared) || self.core.destination.ordinal != ordinal {
            return Err(Error::new(ErrorKind::Internal, "a copy of imported memory")
                .because("it was imported by another domain"));
        }
        self.core.begin()
    }
}

impl Imported for Import {
    fn state(&self) -> ImportState {
        match &self.core.status.lock().step {
            Step::Pending => ImportState::Pending,
            Step::Ready(_) => ImportState::Ready,
            Step::Gone(error) => ImportState::Gone(error.clone()),
        }
    }

    fn length(&self) -> u64 {
        self.core.description.length
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        self.core.status.lock().dropped = true;
        self.core.shared.wake_thread();
    }
}

impl fmt::Debug for Import {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = self.core.status.lock();
        let step = match &status.step {
            Step::Pending => "pending".to_owned(),
            Step::Ready(address) => format!("at {address:#x}"),
            Step::Gone(error) => error.to_string(),
        };
        let (length, device) = (self.core.description.length, &self.core.destination.pci);
        write!(
            f,
            "Import({length} bytes for cuda:{device}, {step}, {} copies)",
            status.uses
        )
    }
}

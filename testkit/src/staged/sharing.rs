//! Memory of one domain that others copy out of by themselves, as devices' drivers let processes of one host do.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

use kvxfer_core::memory::{Exported, ImportState, Imported, ImportedRun, Region};
use kvxfer_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use super::{Piece, StagedMemory, Storage};

/// Everything that is exported in this process, by its token: the driver's part.
static EXPORTS: LazyLock<Mutex<HashMap<u64, Weak<Exporting>>>> = LazyLock::new(Mutex::default);
static NEXT: AtomicU64 = AtomicU64::new(1);

/// How a domain shares its memory.
#[derive(Debug, Default)]
pub struct Sharing {
    exports: AtomicBool,
    /// How long an import takes; none is made if it is not set.
    imports: Mutex<Option<Duration>>,
    refused: AtomicUsize,
    pub(super) copies: AtomicUsize,
}

impl Sharing {
    /// From now on the domain's regions are exported, and it imports those of others, which takes `delay`.
    pub fn allow(&self, delay: Duration) {
        self.exports.store(true, Ordering::SeqCst);
        *self.imports.lock() = Some(delay);
    }

    /// The next so many imports fail.
    pub fn refuse_imports(&self, count: usize) {
        self.refused.store(count, Ordering::SeqCst);
    }

    /// Copies out of imported memory that were started.
    pub fn copies(&self) -> usize {
        self.copies.load(Ordering::SeqCst)
    }

    pub(super) fn export(&self, domain: &StagedMemory, region: &Arc<Region>) -> Option<Result<Arc<dyn Exported>>> {
        if !self.exports.load(Ordering::SeqCst) {
            return None;
        }
        let token = NEXT.fetch_add(1, Ordering::SeqCst);
        let exporting = domain.shared.state.lock().storage(region).map(|storage| {
            Arc::new(Exporting {
                description: token.to_le_bytes(),
                storage,
                length: region.length(),
                recalled: AtomicBool::new(false),
                imports: AtomicUsize::new(0),
                copies: AtomicUsize::new(0),
            })
        });
        Some(exporting.map(|exporting| {
            EXPORTS.lock().insert(token, Arc::downgrade(&exporting));
            Arc::new(Export {
                exporting,
                _region: Arc::clone(region),
            }) as Arc<dyn Exported>
        }))
    }

    pub(super) fn import(&self, description: &[u8]) -> Option<Arc<dyn Imported>> {
        let delay = (*self.imports.lock())?;
        let token = description.try_into().ok().map(u64::from_le_bytes);
        let found = token.and_then(|token| EXPORTS.lock().get(&token)?.upgrade());
        let one_less = |count: usize| count.checked_sub(1);
        let refused = self.refused.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
        let exporting = found.filter(|_| refused.is_err());
        if let Some(exporting) = &exporting {
            exporting.imports.fetch_add(1, Ordering::SeqCst);
        }
        Some(Arc::new(Import {
            exporting,
            ready: Instant::now() + delay,
        }))
    }
}

#[derive(Debug)]
struct Exporting {
    description: [u8; 8],
    storage: Weak<Storage>,
    length: u64,
    recalled: AtomicBool,
    imports: AtomicUsize,
    /// Under way.
    copies: AtomicUsize,
}

#[derive(Debug)]
struct Export {
    exporting: Arc<Exporting>,
    _region: Arc<Region>,
}

impl Exported for Export {
    fn description(&self) -> &[u8] {
        &self.exporting.description
    }

    fn recall(&self) {
        self.exporting.recalled.store(true, Ordering::SeqCst);
    }

    fn importers(&self) -> usize {
        match self.exporting.recalled.load(Ordering::SeqCst) {
            true => self.exporting.copies.load(Ordering::SeqCst),
            false => self.exporting.imports.load(Ordering::SeqCst),
        }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.recall();
    }
}

#[derive(Debug)]
struct Import {
    exporting: Option<Arc<Exporting>>,
    ready: Instant,
}

impl Imported for Import {
    fn state(&self) -> ImportState {
        let gone = |kind, why| ImportState::Gone(Error::new(kind, "an import").because(why));
        match &self.exporting {
            None => gone(
                ErrorKind::ResourceExhausted,
                "the test wanted it to fail, or there is no such export",
            ),
            Some(exporting) if exporting.recalled.load(Ordering::SeqCst) => {
                gone(ErrorKind::NotRegistered, "its owner has recalled it")
            }
            Some(_) if Instant::now() < self.ready => ImportState::Pending,
            Some(_) => ImportState::Ready,
        }
    }

    fn length(&self) -> u64 {
        self.exporting.as_ref().map_or(0, |exporting| exporting.length)
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        if let Some(exporting) = &self.exporting {
            exporting.imports.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// What a copy reads: it keeps the imports.
#[derive(Debug)]
pub(super) struct InFlight {
    runs: Vec<(Arc<Exporting>, Piece)>,
}

impl InFlight {
    /// The bytes as they are now.
    pub(super) fn read(&self) -> Result<Vec<u8>, String> {
        let mut bytes = Vec::new();
        for (_, (storage, offset, length)) in &self.runs {
            let Some(storage) = storage.upgrade() else {
                return Err("the imported region was freed before the copy was done".into());
            };
            bytes.extend_from_slice(&storage.bytes.lock()[*offset..offset + length]);
        }
        Ok(bytes)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        for (exporting, _) in &self.runs {
            exporting.copies.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

pub(super) fn hold(from: &[ImportedRun<'_>]) -> Result<InFlight> {
    let mut held = InFlight { runs: Vec::new() };
    for run in from {
        let any: &dyn std::any::Any = run.region.as_ref();
        let import = any
            .downcast_ref::<Import>()
            .ok_or_else(|| Error::new(ErrorKind::Internal, "an import of another domain"))?;
        if let ImportState::Gone(error) = import.state() {
            return Err(error);
        }
        let Some(exporting) = &import.exporting else { continue };
        match run.offset.checked_add(run.length) {
            Some(end) if end <= exporting.length => {}
            _ => {
                return Err(Error::new(
                    ErrorKind::OutOfBounds,
                    format!("{} bytes at {}", run.length, run.offset),
                )
                .because(format!("the imported region has {}", exporting.length)));
            }
        }
        exporting.copies.fetch_add(1, Ordering::SeqCst);
        let piece = (exporting.storage.clone(), run.offset as usize, run.length as usize);
        held.runs.push((Arc::clone(exporting), piece));
    }
    Ok(held)
}

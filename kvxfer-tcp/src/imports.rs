//! The receiver's half of references: what the peer has said of its exports, and what has been mapped of them.

use std::collections::HashMap;
use std::sync::Arc;

use kvxfer_core::memory::{ImportState, Imported, MemoryDomain};
use kvxfer_core::wire::lane::LaneHeader;
use parking_lot::Mutex;

/// Exports of a peer that a link remembers, at most; what it says of others is not listened to.
const DESCRIBED_MAX: usize = 8192;

/// A peer's exports, as one link knows them.
#[derive(Default)]
pub(crate) struct Imports {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    described: HashMap<u32, Described>,
    /// Those that copies have gone into, so far without references.
    domains: Vec<Arc<dyn MemoryDomain>>,
    /// Imports that were pending when last looked at.
    pending: usize,
    /// There may be something to import.
    stale: bool,
}

struct Described {
    description: Vec<u8>,
    imports: Vec<Import>,
    /// The peer knows that it was mapped.
    told: bool,
}

/// An export as one domain has mapped it.
struct Import {
    domain: Arc<dyn MemoryDomain>,
    /// `None`: it does not, or it has gone.
    region: Option<Arc<dyn Imported>>,
}

impl Imports {
    /// The peer describes an export. Again, if it cannot know whether it was heard.
    pub(crate) fn described(&self, number: u32, description: &[u8]) {
        let mut state = self.state.lock();
        if state.described.len() >= DESCRIBED_MAX && !state.described.contains_key(&number) {
            return;
        }
        state.stale = true;
        match state.described.get_mut(&number) {
            Some(known) if known.description == description => known.told = false,
            _ => {
                let new = Described {
                    description: description.to_vec(),
                    imports: Vec::new(),
                    told: false,
                };
                state.described.insert(number, new);
            }
        }
    }

    /// Bytes are going into this domain's memory by staging: maps what the peer has exported, so that the next need not.
    /// What has been mapped meanwhile is said in `out`.
    pub(crate) fn wanted_in(&self, domain: &Arc<dyn MemoryDomain>, out: &mut Vec<u8>) {
        let mut state = self.state.lock();
        if !state.domains.iter().any(|known| Arc::ptr_eq(known, domain)) {
            state.domains.push(Arc::clone(domain));
            state.stale = true;
        }
        state.import();
        state.tell(out);
    }

    /// The export as this domain has mapped it.
    pub(crate) fn get(&self, number: u32, domain: &Arc<dyn MemoryDomain>) -> Option<Arc<dyn Imported>> {
        let mut state = self.state.lock();
        let known = state.described.get_mut(&number)?;
        let mut imports = known.imports.iter_mut();
        let import = imports.find(|import| Arc::ptr_eq(&import.domain, domain))?;
        let region = import.region.as_ref()?;
        match region.state() {
            ImportState::Ready => Some(Arc::clone(region)),
            ImportState::Pending => None,
            ImportState::Gone(error) => {
                tracing::debug!(%error, number, "an import has gone");
                import.region = None;
                None
            }
        }
    }

    /// How many of the peer's exports are mapped here, and how many it has described.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let state = self.state.lock();
        let ready = |import: &Import| {
            let region = import.region.as_ref();
            region.is_some_and(|region| matches!(region.state(), ImportState::Ready))
        };
        let mapped = state.described.values().filter(|known| known.imports.iter().any(ready));
        (mapped.count(), state.described.len())
    }
}

impl State {
    fn import(&mut self) {
        if !std::mem::take(&mut self.stale) {
            return;
        }
        for known in self.described.values_mut() {
            for domain in &self.domains {
                let known_to = |import: &Import| Arc::ptr_eq(&import.domain, domain);
                if !known.imports.iter().any(known_to) {
                    known.imports.push(Import {
                        domain: Arc::clone(domain),
                        region: domain.import(&known.description),
                    });
                }
            }
        }
        self.pending = usize::MAX;
    }

    fn tell(&mut self, out: &mut Vec<u8>) {
        if self.pending == 0 {
            return;
        }
        self.pending = 0;
        for (&number, known) in &mut self.described {
            let mut ready = false;
            for import in &mut known.imports {
                match import.region.as_ref().map(|region| region.state()) {
                    Some(ImportState::Pending) => self.pending += 1,
                    Some(ImportState::Ready) => ready = true,
                    Some(ImportState::Gone(error)) => {
                        tracing::debug!(%error, number, domain = import.domain.name(), "an export was not mapped");
                        import.region = None;
                    }
                    None => {}
                }
            }
            if ready && !known.told {
                known.told = true;
                out.extend_from_slice(&LaneHeader::Imported { number }.encode());
            }
        }
    }
}

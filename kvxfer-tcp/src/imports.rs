//! The receiver's half of references: what the peer has said of its exports, and what has been mapped of them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvxfer_core::memory::{ImportState, Imported, MemoryDomain};
use kvxfer_core::wire::lane::LaneHeader;
use kvxfer_core::{Error, ErrorKind};
use parking_lot::Mutex;

/// Exports of a peer that a link remembers, at most; what it says of others is not listened to.
const DESCRIBED_MAX: usize = 8192;

/// What could not be mapped is tried again after this long, and then after twice as long each time.
const AGAIN_AFTER: Duration = Duration::from_secs(30);
const AGAIN_AFTER_MAX: Duration = Duration::from_secs(3600);

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
    /// When something is to be tried again.
    again: Option<Instant>,
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
    /// When it is tried again, if it is, and after how long the next time.
    again: Option<Instant>,
    pause: Duration,
}

impl Import {
    fn of(domain: &Arc<dyn MemoryDomain>, description: &[u8]) -> Import {
        Import {
            domain: Arc::clone(domain),
            region: domain.import(description),
            again: None,
            pause: AGAIN_AFTER,
        }
    }

    /// It has gone: for good if its owner has taken it back.
    fn gone(&mut self, error: &Error, number: u32) {
        tracing::debug!(%error, number, domain = self.domain.name(), "an export is not mapped");
        self.region = None;
        if error.kind() != ErrorKind::NotRegistered {
            self.again = Some(Instant::now() + self.pause);
            self.pause = (2 * self.pause).min(AGAIN_AFTER_MAX);
        }
    }
}

impl Imports {
    /// The peer describes an export. Again, if it cannot know whether it was heard.
    pub(crate) fn described(&self, number: u32, description: &[u8]) {
        let mut state = self.state.lock();
        if state.described.len() >= DESCRIBED_MAX && !state.described.contains_key(&number) {
            // Numbers are not used again: what has been taken back is not referred to any more.
            state.described.retain(|_, known| !known.is_gone());
            if state.described.len() >= DESCRIBED_MAX {
                return;
            }
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
                import.gone(&error, number);
                let again = import.again;
                state.try_again_at(again);
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
        let live = state.described.values().filter(|known| !known.is_gone());
        let mapped = live.clone().filter(|known| known.imports.iter().any(ready));
        (mapped.count(), live.count())
    }
}

impl Described {
    /// It was imported, and none of that is left.
    fn is_gone(&self) -> bool {
        let left = |import: &Import| {
            let region = import.region.as_ref();
            region.is_some_and(|region| !matches!(region.state(), ImportState::Gone(_)))
        };
        let comes_back = |import: &Import| import.again.is_some();
        !self.imports.is_empty() && !self.imports.iter().any(|import| left(import) || comes_back(import))
    }
}

impl State {
    fn try_again_at(&mut self, time: Option<Instant>) {
        self.again = [self.again, time].into_iter().flatten().min();
    }

    /// Imports once more what could not be mapped and whose time has come.
    fn import_again(&mut self) {
        if self.again.is_none_or(|again| Instant::now() < again) {
            return;
        }
        self.again = None;
        let now = Instant::now();
        let mut next: Option<Instant> = None;
        for known in self.described.values_mut() {
            for import in &mut known.imports {
                match import.again {
                    Some(again) if again <= now => {
                        import.again = None;
                        import.region = import.domain.import(&known.description);
                        known.told = false;
                    }
                    Some(again) => next = Some(next.map_or(again, |next| next.min(again))),
                    None => {}
                }
            }
        }
        self.try_again_at(next);
        self.pending = usize::MAX;
    }

    fn import(&mut self) {
        self.import_again();
        if !std::mem::take(&mut self.stale) {
            return;
        }
        for known in self.described.values_mut() {
            for domain in &self.domains {
                let known_to = |import: &Import| Arc::ptr_eq(&import.domain, domain);
                if !known.imports.iter().any(known_to) {
                    known.imports.push(Import::of(domain, &known.description));
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
        let mut again = None;
        for (&number, known) in &mut self.described {
            let mut ready = false;
            for import in &mut known.imports {
                match import.region.as_ref().map(|region| region.state()) {
                    Some(ImportState::Pending) => self.pending += 1,
                    Some(ImportState::Ready) => ready = true,
                    Some(ImportState::Gone(error)) => {
                        import.gone(&error, number);
                        again = [again, import.again].into_iter().flatten().min();
                    }
                    None => {}
                }
            }
            if ready && !known.told {
                known.told = true;
                out.extend_from_slice(&LaneHeader::Imported { number }.encode());
            }
        }
        self.try_again_at(again);
    }
}

#[cfg(test)]
mod tests {
    use kvxfer_core::memory::Exported;
    use kvxfer_testkit::staged::StagedMemory;

    use super::*;

    fn sharing() -> (Arc<StagedMemory>, Arc<dyn MemoryDomain>) {
        let memory = StagedMemory::new(Duration::ZERO, 1).unwrap();
        memory.sharing().allow(Duration::ZERO);
        let domain = Arc::clone(&memory) as Arc<dyn MemoryDomain>;
        (memory, domain)
    }

    fn exported(memory: &Arc<StagedMemory>) -> Arc<dyn Exported> {
        let region = memory.allocate(64).unwrap();
        memory.export(&region).unwrap().unwrap()
    }

    fn is_mapped(imports: &Imports, number: u32, domain: &Arc<dyn MemoryDomain>) -> bool {
        imports.wanted_in(domain, &mut Vec::new());
        imports.get(number, domain).is_some()
    }

    #[test]
    fn what_is_taken_back_makes_room_for_what_is_new() {
        let (memory, domain) = sharing();
        let imports = Imports::default();
        let first = exported(&memory);
        imports.described(0, first.description());
        assert!(is_mapped(&imports, 0, &domain));
        let taken_back = exported(&memory);
        for number in 1..2 * DESCRIBED_MAX as u32 {
            imports.described(number, taken_back.description());
            if number == 100 {
                imports.wanted_in(&domain, &mut Vec::new());
                taken_back.recall();
            }
            if number % 1000 == 0 {
                imports.wanted_in(&domain, &mut Vec::new());
            }
        }
        let number = 2 * DESCRIBED_MAX as u32;
        let new = exported(&memory);
        imports.described(number, new.description());
        assert!(is_mapped(&imports, number, &domain));
        assert!(is_mapped(&imports, 0, &domain), "what is still there stays");
        assert!(imports.state.lock().described.len() <= DESCRIBED_MAX);
    }

    #[test]
    fn what_could_not_be_mapped_is_tried_again_and_what_was_taken_back_is_not() {
        let (memory, domain) = sharing();
        let imports = Imports::default();
        let export = exported(&memory);
        imports.described(7, export.description());
        memory.sharing().refuse_imports(1);
        assert!(!is_mapped(&imports, 7, &domain));
        assert!(!is_mapped(&imports, 7, &domain), "not at once");
        let its_time_has_come = || {
            let mut state = imports.state.lock();
            let now = Some(Instant::now());
            state.again = state.again.and(now);
            for import in state.described.values_mut().flat_map(|known| &mut known.imports) {
                import.again = import.again.and(now);
            }
        };
        its_time_has_come();
        let mut said = Vec::new();
        imports.wanted_in(&domain, &mut said);
        assert!(imports.get(7, &domain).is_some());
        assert_eq!(
            said,
            LaneHeader::Imported { number: 7 }.encode(),
            "the peer hears of it"
        );
        export.recall();
        assert!(!is_mapped(&imports, 7, &domain));
        its_time_has_come();
        assert!(!is_mapped(&imports, 7, &domain));
        assert!(imports.state.lock().again.is_none());
    }
}

//! The sender's half of references: which regions a peer on this host may map, what it has been told of them, and chunks as
//! lists of runs of them in place of their bytes.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use kvxfer_core::Error;
use kvxfer_core::flow::{Chunk, ChunkName, Gate, Payload, TransferId};
use kvxfer_core::memory::{Exported, Region, Segment};
use kvxfer_core::wire::lane::LaneHeader;
use kvxfer_core::wire::reference::{RUNS_MAX, Run};
use parking_lot::Mutex;

use crate::staging::StagingPool;

/// Exports that a link's peer is told of at once, at most; regions beyond are staged.
const TOLD_MAX: usize = 4096;
/// Transfers that a link remembers to send as bytes, at most. One that is forgotten is declined again.
const AS_BYTES_MAX: usize = 256;

/// The exported regions of an endpoint's pools.
#[derive(Default)]
pub(crate) struct ExportTable {
    // By the region's address: registrations keep their regions.
    regions: Mutex<HashMap<usize, Arc<Entry>>>,
    next: AtomicU32,
}

/// One export, of all registrations that the region is in.
#[derive(Debug)]
struct Entry {
    number: u32,
    exported: Arc<dyn Exported>,
    /// Registrations that have not recalled it.
    live: AtomicUsize,
}

impl Entry {
    fn is_live(&self) -> bool {
        self.live.load(Ordering::SeqCst) > 0
    }

    /// One registration more, unless the last has recalled it.
    fn join(&self) -> bool {
        let more = |live: usize| (live > 0).then_some(live + 1);
        self.live.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_ok()
    }
}

/// A registration's share in an export: recalled when all of them are.
#[derive(Debug)]
struct Joint {
    entry: Arc<Entry>,
    recalled: AtomicBool,
}

impl Exported for Joint {
    fn description(&self) -> &[u8] {
        self.entry.exported.description()
    }

    fn recall(&self) {
        let first = !self.recalled.swap(true, Ordering::SeqCst);
        if first && self.entry.live.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.entry.exported.recall();
        }
    }

    /// Those of other registrations are not this one's.
    fn importers(&self) -> usize {
        match self.recalled.load(Ordering::SeqCst) && self.entry.is_live() {
            true => 0,
            false => self.entry.exported.importers(),
        }
    }
}

impl Drop for Joint {
    fn drop(&mut self) {
        self.recall();
    }
}

impl ExportTable {
    fn is_empty(&self) -> bool {
        self.regions.lock().is_empty()
    }

    /// Exports a region, unless its domain does not do that. Why not, if it might.
    fn add(&self, region: &Arc<Region>) -> Result<Option<Arc<dyn Exported>>, Error> {
        let mut regions = self.regions.lock();
        let joint = |entry: &Arc<Entry>| -> Arc<dyn Exported> {
            Arc::new(Joint {
                entry: Arc::clone(entry),
                recalled: AtomicBool::new(false),
            })
        };
        if let Some(entry) = regions.get(&key(region)).filter(|entry| entry.join()) {
            return Ok(Some(joint(entry)));
        }
        let Some(exported) = region.domain().export(region).transpose()? else {
            return Ok(None);
        };
        // Numbers are not used again: after four thousand million registrations memory is staged.
        let next = |number: u32| number.checked_add(1);
        let Ok(number) = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) else {
            return Ok(None);
        };
        let entry = Arc::new(Entry {
            number,
            exported,
            live: AtomicUsize::new(1),
        });
        regions.insert(key(region), Arc::clone(&entry));
        Ok(Some(joint(&entry)))
    }
}

fn key(region: &Arc<Region>) -> usize {
    Arc::as_ptr(region) as usize
}

/// What a registration has exported. When it goes, it is recalled.
pub(crate) struct ExportHold {
    table: Arc<ExportTable>,
    regions: Vec<(Arc<Region>, Arc<dyn Exported>)>,
    /// Why not more, for people.
    pub(crate) refused: Vec<Error>,
}

impl ExportHold {
    pub(crate) fn of(table: &Arc<ExportTable>, regions: &[Arc<Region>]) -> ExportHold {
        let mut hold = ExportHold {
            table: Arc::clone(table),
            regions: Vec::new(),
            refused: Vec::new(),
        };
        for region in regions {
            match table.add(region) {
                Ok(Some(exported)) => hold.regions.push((Arc::clone(region), exported)),
                Ok(None) => {}
                Err(error) => hold.refused.push(error),
            }
        }
        hold
    }

    pub(crate) fn exported(&self) -> Vec<Arc<dyn Exported>> {
        self.regions.iter().map(|(_, exported)| Arc::clone(exported)).collect()
    }
}

impl Drop for ExportHold {
    fn drop(&mut self) {
        let mut table = self.table.regions.lock();
        for (region, exported) in &self.regions {
            exported.recall();
            if table.get(&key(region)).is_some_and(|entry| !entry.is_live()) {
                table.remove(&key(region));
            }
        }
    }
}

/// What the peer of one link knows of the exports.
pub(crate) struct Exports {
    /// `None`: the peer is not on this host.
    table: Option<Arc<ExportTable>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    told: HashMap<u32, Told>,
    as_bytes: VecDeque<TransferId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Described,
    /// The peer takes references to it.
    Imported,
}

/// A chunk as a reference, on its way out.
pub(crate) struct OutReference {
    /// The header and its runs.
    pub(crate) bytes: Vec<u8>,
    pub(crate) sent: usize,
    pub(crate) name: ChunkName,
    pub(crate) source: ReferredTo,
}

/// Whose memory a reference is to.
#[derive(Clone)]
pub(crate) struct ReferredTo {
    pub(crate) transfer: TransferId,
    pub(crate) gate: Arc<Gate>,
}

impl Exports {
    pub(crate) fn new(table: Option<Arc<ExportTable>>) -> Exports {
        Exports {
            table,
            state: Mutex::default(),
        }
    }

    /// The chunk as a reference, if all of it is in memory that the peer has mapped. Otherwise what the peer is to be told of
    /// that memory is added to `descriptions`, once.
    pub(crate) fn refer(
        &self,
        chunk: &Chunk,
        staging: &Arc<StagingPool>,
        descriptions: &mut Vec<u8>,
    ) -> Option<OutReference> {
        let table = self.table.as_deref().filter(|table| !table.is_empty())?;
        let Payload::Stream {
            stream, regions, gate, ..
        } = &chunk.payload
        else {
            return None;
        };
        let header = chunk.header;
        if header.checksummed || gate.is_closed() {
            return None;
        }
        let mut segments = Vec::new();
        let covered = stream.segments(header.offset, header.length.into(), RUNS_MAX, &mut segments);
        if covered != u64::from(header.length) {
            return None;
        }
        let runs = self.runs(table, chunk.transfer, regions, &segments, descriptions)?;
        // What it is not is found again, and said, when it is copied.
        staging.verify(gate, regions, &segments).ok()?;
        let reference = LaneHeader::Reference {
            chunk: header,
            bytes: runs.len() as u32,
        };
        let mut bytes = reference.encode().to_vec();
        bytes.extend_from_slice(&runs);
        Some(OutReference {
            bytes,
            sent: 0,
            name: header.name(),
            source: ReferredTo {
                transfer: chunk.transfer,
                gate: Arc::clone(gate),
            },
        })
    }

    /// The segments as runs of exports, encoded.
    fn runs(
        &self,
        table: &ExportTable,
        transfer: TransferId,
        regions: &[Arc<Region>],
        segments: &[Segment],
        descriptions: &mut Vec<u8>,
    ) -> Option<Vec<u8>> {
        let exported = table.regions.lock();
        let mut state = self.state.lock();
        if state.as_bytes.contains(&transfer) {
            return None;
        }
        let mut runs = Vec::new();
        let mut last: Option<(u32, u32)> = None;
        for segment in segments.iter().filter(|segment| segment.length > 0) {
            let number = match last {
                Some((region, number)) if region == segment.region => number,
                _ => {
                    let entry = exported.get(&key(regions.get(segment.region as usize)?))?;
                    let number = Some(entry.number).filter(|_| entry.is_live())?;
                    if state.told.get(&number) != Some(&Told::Imported) {
                        state.describe(&exported, regions, descriptions);
                        return None;
                    }
                    number
                }
            };
            last = Some((segment.region, number));
            let run = Run {
                export: number,
                length: u32::try_from(segment.length).ok()?,
                offset: segment.offset,
            };
            run.encode(&mut runs);
        }
        Some(runs)
    }

    /// The peer has mapped this export.
    pub(crate) fn imported(&self, number: u32) {
        if let Some(told) = self.state.lock().told.get_mut(&number) {
            *told = Told::Imported;
        }
    }

    /// The peer wants the bytes of this transfer.
    pub(crate) fn send_as_bytes(&self, transfer: TransferId) {
        let as_bytes = &mut self.state.lock().as_bytes;
        if !as_bytes.contains(&transfer) {
            if as_bytes.len() >= AS_BYTES_MAX {
                as_bytes.pop_front();
            }
            as_bytes.push_back(transfer);
        }
    }

    /// A lane is lost, and with it maybe what one side told the other.
    pub(crate) fn lane_lost(&self) {
        self.state.lock().told.retain(|_, told| *told == Told::Imported);
    }

    /// How many exports the peer has mapped, and of how many it was told.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let Some(table) = &self.table else { return (0, 0) };
        let exported = table.regions.lock();
        let state = self.state.lock();
        // What was taken back is not counted.
        let live = exported.values().filter(|entry| entry.is_live());
        let told = live.filter_map(|entry| state.told.get(&entry.number));
        let imported = told.clone().filter(|told| **told == Told::Imported).count();
        (imported, told.count())
    }
}

impl State {
    /// Tells the peer of all of these regions that it has not been told of.
    fn describe(&mut self, exported: &HashMap<usize, Arc<Entry>>, regions: &[Arc<Region>], out: &mut Vec<u8>) {
        if self.told.len() + regions.len() > TOLD_MAX {
            let live: HashSet<u32> = exported.values().map(|entry| entry.number).collect();
            self.told.retain(|number, _| live.contains(number));
        }
        for entry in regions.iter().filter_map(|region| exported.get(&key(region))) {
            if self.told.len() >= TOLD_MAX || self.told.contains_key(&entry.number) || !entry.is_live() {
                continue;
            }
            let description = entry.exported.description();
            let header = LaneHeader::Export {
                number: entry.number,
                bytes: description.len() as u32,
            };
            out.extend_from_slice(&header.encode());
            out.extend_from_slice(description);
            self.told.insert(entry.number, Told::Described);
        }
    }
}

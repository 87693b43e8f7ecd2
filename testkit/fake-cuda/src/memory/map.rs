//! Which memory an address leads to. All devices and the host share one address space.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;

use super::backing::Backing;

/// What is at a range of addresses.
#[derive(Debug)]
pub(crate) struct Range {
    /// First address.
    pub(crate) start: u64,
    /// Bytes.
    pub(crate) length: u64,
    /// Never the same for two ranges of one process.
    pub(crate) id: u64,
    /// The device it is on; for host memory, that of the context.
    pub(crate) device: u32,
    /// The context's handle; 0 for memory that belongs to none (VMM, pools).
    pub(crate) context: usize,
    /// Made by the test's engine.
    pub(crate) engine: bool,
    /// Its kind.
    pub(crate) kind: Kind,
    /// Copies of it wait for each other.
    pub(crate) sync_memops: AtomicBool,
}

/// The kind of a range.
#[derive(Debug)]
pub(crate) enum Kind {
    /// cuMemAlloc: the addresses from `block`, `block_length` long, are reserved for it.
    Device {
        backing: Arc<Backing>,
        offset: u64,
        block: u64,
        block_length: u64,
    },
    /// Stream-ordered allocations.
    Pool {
        backing: Arc<Backing>,
        offset: u64,
        block: u64,
        block_length: u64,
        pool: usize,
    },
    /// VMM: a mapping of a physical allocation; the devices that may read and write.
    Mapping {
        physical: Arc<Physical>,
        offset: u64,
        access: Mutex<HashMap<u32, u32>>,
    },
    /// Another process's, by a legacy IPC handle, opened so often.
    Imported {
        backing: Arc<Backing>,
        offset: u64,
        block: u64,
        block_length: u64,
        key: (u32, u64),
        opened: Mutex<u32>,
    },
    /// Page-locked host memory that the driver allocated.
    HostAllocated { flags: u32 },
    /// Page-locked host memory of the caller's.
    HostRegistered { flags: u32 },
    /// Both sides'.
    Managed,
}

/// A physical allocation of the VMM interface.
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) backing: Arc<Backing>,
    pub(crate) device: u32,
    pub(crate) gpudirect: bool,
    pub(crate) handle_types: u32,
    /// By a descriptor, of this process or another.
    pub(crate) imported: bool,
    pub(crate) engine: bool,
}

impl Range {
    /// Past the last byte.
    pub(crate) fn end(&self) -> u64 {
        self.start + self.length
    }

    /// Whether the CPU may touch it.
    pub(crate) fn is_host(&self) -> bool {
        matches!(
            self.kind,
            Kind::HostAllocated { .. } | Kind::HostRegistered { .. } | Kind::Managed
        )
    }

    /// Whether it is host memory that is page-locked.
    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self.kind, Kind::HostAllocated { .. } | Kind::HostRegistered { .. })
    }

    /// The device's bytes, and where the range begins in them.
    pub(crate) fn backing(&self) -> Option<(&Arc<Backing>, u64)> {
        match &self.kind {
            Kind::Device { backing, offset, .. }
            | Kind::Pool { backing, offset, .. }
            | Kind::Imported { backing, offset, .. } => Some((backing, *offset)),
            Kind::Mapping { physical, offset, .. } => Some((&physical.backing, *offset)),
            _ => None,
        }
    }
}

/// What an address leads to.
#[derive(Debug)]
pub(crate) enum Place {
    /// Something that is there.
    Known(Arc<Range>),
    /// What was freed.
    Freed,
    /// Reserved, and nothing mapped.
    Empty,
    /// Nothing that the driver knows: host memory, or nothing at all.
    Unknown,
}

/// All ranges of the process.
#[derive(Debug, Default)]
pub(crate) struct Map {
    ranges: BTreeMap<u64, Arc<Range>>,
    /// What was freed, by first address: its length.
    freed: BTreeMap<u64, u64>,
    /// VMM reservations: length, and whether the engine's.
    pub(crate) reserved: BTreeMap<u64, (u64, bool)>,
    /// Reserved blocks that may be used again, by length.
    spare: HashMap<u64, Vec<u64>>,
    /// Bytes in use on each device.
    pub(crate) used: HashMap<u32, u64>,
    last_id: u64,
}

impl Map {
    /// A number for a range.
    pub(crate) fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Adds a range, which overlaps none.
    pub(crate) fn add(&mut self, range: Range) {
        let (start, end) = (range.start, range.end());
        let gone: Vec<u64> = overlapping(&self.freed, start, end, |length| *length);
        for old in gone {
            self.freed.remove(&old);
        }
        self.ranges.insert(start, Arc::new(range));
    }

    /// Removes the range that begins there.
    pub(crate) fn remove(&mut self, start: u64) -> Option<Arc<Range>> {
        let range = self.ranges.remove(&start)?;
        // Those addresses stay reserved, so that nothing else can be there.
        if matches!(
            range.kind,
            Kind::Device { .. } | Kind::Pool { .. } | Kind::Imported { .. }
        ) {
            self.freed.insert(start, range.length);
        }
        Some(range)
    }

    /// The range that begins there.
    pub(crate) fn at(&self, start: u64) -> Option<&Arc<Range>> {
        self.ranges.get(&start)
    }

    /// The range that holds the address.
    pub(crate) fn holding(&self, address: u64) -> Option<&Arc<Range>> {
        let (_, range) = self.ranges.range(..=address).next_back()?;
        (address < range.end()).then_some(range)
    }

    /// Whether any range overlaps these addresses.
    pub(crate) fn is_taken(&self, start: u64, length: u64) -> bool {
        !overlapping(&self.ranges, start, start + length, |range| range.length).is_empty()
    }

    /// What the address leads to.
    pub(crate) fn place(&self, address: u64) -> Place {
        if let Some(range) = self.holding(address) {
            return Place::Known(range.clone());
        }
        let inside = |(start, length): (&u64, u64)| address < start + length;
        if self
            .freed
            .range(..=address)
            .next_back()
            .map(|(s, l)| (s, *l))
            .is_some_and(inside)
        {
            return Place::Freed;
        }
        if self
            .reserved
            .range(..=address)
            .next_back()
            .map(|(s, l)| (s, l.0))
            .is_some_and(inside)
        {
            return Place::Empty;
        }
        Place::Unknown
    }

    /// All ranges.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Range>> {
        self.ranges.values()
    }

    /// A block of that length that was used before.
    pub(crate) fn take_spare(&mut self, length: u64) -> Option<u64> {
        self.spare.get_mut(&length)?.pop()
    }

    /// A block that may be used again.
    pub(crate) fn keep_spare(&mut self, block: u64, length: u64) {
        self.spare.entry(length).or_default().push(block);
    }
}

fn overlapping<T>(map: &BTreeMap<u64, T>, start: u64, end: u64, length: impl Fn(&T) -> u64) -> Vec<u64> {
    let before = map.range(..start).next_back();
    let before = before.filter(|(first, value)| *first + length(value) > start);
    let inside = map.range(start..end);
    before.into_iter().chain(inside).map(|(first, _)| *first).collect()
}

//! The simulated endpoints' memory, byte by byte: whose each byte is, and what it must hold.
//!
//! Every byte of a pool has an owner (the handle that holds its block) and a stamp (which attempt of which source
//! handle wrote it). Reads and writes of lanes are checked against the owners at the moment they happen, so that a
//! late write into a reused block, or a read from one, is seen at once, whatever values the bytes have.

use std::sync::Arc;

use kvxfer_core::flow::ByteStream;
use kvxfer_core::layout::{BlockId, PoolLayout, Selection};
use kvxfer_core::memory::Region;
use kvxfer_core::{PoolId, Result};

use super::ledger::{Serial, Shape, What};
use super::transmit::segments_of;
use super::world::{NodeIndex, World};
use crate::pattern::{self, Content};
use crate::rng::mix;

/// Who wrote a byte: an index in the world's list of stamps. 0 is nobody.
pub(crate) type Stamp = u32;

/// Bytes that a sender made up: a message, filler, or damage.
pub(crate) const FILLER: Stamp = u32::MAX;

/// Which attempt of which source handle a byte is of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StampOf {
    pub(crate) serial: Serial,
    pub(crate) attempt: u32,
}

/// A pool with its allocator and its oracle's maps.
pub(crate) struct SimPool {
    pub(crate) id: PoolId,
    pub(crate) layout: Arc<PoolLayout>,
    pub(crate) regions: Arc<[Arc<Region>]>,
    pub(crate) owner: Vec<Vec<Serial>>,
    pub(crate) stamp: Vec<Vec<Stamp>>,
    /// Which event a byte waits for before it may be read; 0 is none.
    pub(crate) sealed: Vec<Vec<u32>>,
    /// Free blocks by cache group; the last one freed is the next one given.
    free: Vec<Vec<BlockId>>,
    ever_used: Vec<Vec<bool>>,
    pub(crate) removed: bool,
}

impl SimPool {
    pub(crate) fn new(id: PoolId, layout: PoolLayout) -> Result<SimPool> {
        let regions = layout
            .region_lengths()
            .iter()
            .map(|length| Region::allocate(*length))
            .collect::<Result<Vec<_>>>()?;
        let bytes = |value| -> Vec<Vec<u32>> {
            layout
                .region_lengths()
                .iter()
                .map(|length| vec![value; *length as usize])
                .collect()
        };
        let free = layout
            .cache_groups()
            .iter()
            .map(|group| (0..group.blocks).rev().collect())
            .collect();
        let used = layout
            .cache_groups()
            .iter()
            .map(|group| vec![false; group.blocks as usize])
            .collect();
        Ok(SimPool {
            id,
            owner: bytes(0),
            stamp: bytes(0),
            sealed: bytes(0),
            free,
            ever_used: used,
            regions: regions.into(),
            layout: Arc::new(layout),
            removed: false,
        })
    }

    /// Takes `count` blocks of a group; `None` if there are not as many. Says whether one was used before.
    pub(crate) fn allocate(&mut self, group: usize, count: usize) -> Option<(Vec<BlockId>, bool)> {
        let free = &mut self.free[group];
        if free.len() < count {
            return None;
        }
        let blocks = free.split_off(free.len() - count);
        let mut reused = false;
        for block in &blocks {
            reused |= std::mem::replace(&mut self.ever_used[group][*block as usize], true);
        }
        Some((blocks, reused))
    }

    pub(crate) fn free_blocks(&self, group: usize) -> usize {
        self.free[group].len()
    }

    /// The bytes of a block: region, offset, length, for each plane.
    pub(crate) fn block_runs(&self, group: usize, block: BlockId) -> Vec<(usize, usize, usize)> {
        self.layout
            .planes()
            .iter()
            .filter(|plane| usize::from(plane.group) == group)
            .map(|plane| {
                let offset = plane.base + u64::from(block) * plane.stride;
                (plane.region as usize, offset as usize, plane.block_length as usize)
            })
            .collect()
    }

    /// Gives blocks to an owner (or to nobody) and fills them with bytes that no content has.
    pub(crate) fn give(&mut self, group: usize, blocks: &[BlockId], owner: Serial, salt: u64) {
        for block in blocks {
            for (region, offset, length) in self.block_runs(group, *block) {
                let bytes: Vec<u8> = (0..length.div_ceil(8) as u64)
                    .flat_map(|word| mix(salt ^ mix(word + offset as u64)).to_le_bytes())
                    .take(length)
                    .collect();
                // Inside the region, since the layout was validated against it.
                let _ = self.regions[region].copy_in(offset as u64, &bytes);
                self.owner[region][offset..offset + length].fill(owner);
                self.stamp[region][offset..offset + length].fill(0);
                self.sealed[region][offset..offset + length].fill(0);
            }
        }
    }

    pub(crate) fn take_back(&mut self, group: usize, blocks: &[BlockId], salt: u64) {
        self.give(group, blocks, 0, salt);
        self.free[group].extend_from_slice(blocks);
    }

    /// Bytes that somebody owns, and one who does.
    pub(crate) fn owned_bytes(&self) -> (usize, Serial) {
        let owners = || self.owner.iter().flatten().copied().filter(|owner| *owner != 0);
        (owners().count(), owners().next().unwrap_or(0))
    }
}

/// The bytes that descriptors name, in list order: region and offset.
pub(crate) fn descriptor_runs(
    layout: &PoolLayout,
    descriptors: &[kvxfer_core::layout::BlockDescriptor],
) -> Vec<(usize, u64, u64)> {
    descriptors
        .iter()
        .map(|piece| {
            let plane = &layout.planes()[piece.plane as usize];
            let base = plane.base + u64::from(piece.block) * plane.stride + u64::from(piece.offset);
            (plane.region as usize, base, u64::from(piece.length))
        })
        .collect()
}

/// What stands at this position of a source given by descriptors.
pub(crate) fn descriptor_byte(serial: Serial, position: u64) -> u8 {
    mix(mix(u64::from(serial)) ^ position) as u8
}

impl World {
    fn pool_of(&self, node: NodeIndex, regions: &Arc<[Arc<Region>]>) -> Option<usize> {
        let body = self.nodes[node].body.as_ref()?;
        body.pools
            .iter()
            .position(|pool| pool.regions.first().map(Arc::as_ptr) == regions.first().map(Arc::as_ptr))
    }

    /// What a call reads from source blocks, checked: only blocks that an open source handle holds may be read.
    pub(crate) fn read_source(
        &mut self,
        node: NodeIndex,
        stream: &dyn ByteStream,
        regions: &Arc<[Arc<Region>]>,
        offset: u64,
        length: u64,
    ) -> (Vec<u8>, Vec<Stamp>) {
        let mut bytes = Vec::with_capacity(length as usize);
        let mut stamps = Vec::with_capacity(length as usize);
        let Some(pool) = self.pool_of(node, regions) else {
            self.fail("3 no false read", format!("node {node} reads a pool it does not have"));
            return (bytes, stamps);
        };
        let mut trespass = None;
        if let Some(body) = self.nodes[node].body.as_ref() {
            let pool = &body.pools[pool];
            for segment in segments_of(stream, offset, length) {
                let (region, start, count) = (
                    segment.region as usize,
                    segment.offset as usize,
                    segment.length as usize,
                );
                let before = bytes.len();
                bytes.resize(before + count, 0);
                if let Err(error) = pool.regions[region].copy_out(segment.offset, &mut bytes[before..]) {
                    trespass = Some(format!("node {node} reads outside a region: {error}"));
                    break;
                }
                stamps.extend_from_slice(&pool.stamp[region][start..start + count]);
                if let Some(event) = pool.sealed[region][start..start + count]
                    .iter()
                    .find(|event| **event != 0)
                {
                    let owner = pool.owner[region][start];
                    trespass = Some(format!(
                        "node {node} reads bytes of {} before event {event} has happened",
                        self.describe(owner)
                    ));
                }
                for owner in &pool.owner[region][start..start + count] {
                    let record = &self.ledger[*owner as usize];
                    if *owner == 0 || !record.is_source() || (record.ended.is_some() && !record.quarantined) {
                        trespass = Some(format!(
                            "node {node} reads bytes of region {region} at {start} for sending, which belong to {}",
                            self.describe(*owner)
                        ));
                    }
                }
            }
        }
        if let Some(words) = trespass {
            self.fail("3 no false read", words);
        }
        (bytes, stamps)
    }

    /// What a device of another endpoint reads here, which nobody can keep it from.
    pub(crate) fn look_at_source(
        &mut self,
        node: NodeIndex,
        stream: &dyn ByteStream,
        regions: &Arc<[Arc<Region>]>,
        offset: u64,
        length: u64,
    ) -> (Vec<u8>, Vec<Stamp>) {
        let (mut bytes, mut stamps) = (Vec::new(), Vec::new());
        let pool = self.pool_of(node, regions);
        let (Some(pool), Some(body)) = (pool, self.nodes[node].body.as_ref()) else {
            return (bytes, stamps);
        };
        let pool = &body.pools[pool];
        for segment in segments_of(stream, offset, length) {
            let (region, start, count) = (
                segment.region as usize,
                segment.offset as usize,
                segment.length as usize,
            );
            let before = bytes.len();
            bytes.resize(before + count, 0);
            if pool.regions[region]
                .copy_out(segment.offset, &mut bytes[before..])
                .is_err()
            {
                bytes.truncate(before);
                break;
            }
            stamps.extend_from_slice(&pool.stamp[region][start..start + count]);
        }
        (bytes, stamps)
    }

    /// Whom the blocks belong to where this byte of a stream goes.
    pub(crate) fn owner_of_stream(
        &self,
        node: NodeIndex,
        stream: &dyn ByteStream,
        regions: &Arc<[Arc<Region>]>,
        offset: u64,
    ) -> Option<Serial> {
        let pool = self.pool_of(node, regions)?;
        let segment = *segments_of(stream, offset, 1).first()?;
        let body = self.nodes[node].body.as_ref()?;
        body.pools[pool].owner[segment.region as usize]
            .get(segment.offset as usize)
            .copied()
    }

    /// What a call places, checked: only bytes of open destinations, only from the sources they are for.
    pub(crate) fn write_destination(
        &mut self,
        node: NodeIndex,
        stream: &dyn ByteStream,
        regions: &Arc<[Arc<Region>]>,
        offset: u64,
        bytes: &[u8],
        stamps: &[Stamp],
    ) {
        let Some(pool) = self.pool_of(node, regions) else {
            self.fail(
                "5 only the granted",
                format!("node {node} writes to a pool it does not have"),
            );
            return;
        };
        let mut done = 0;
        for segment in segments_of(stream, offset, bytes.len() as u64) {
            let (region, start, count) = (
                segment.region as usize,
                segment.offset as usize,
                segment.length as usize,
            );
            let trespass = self.trespass(node, pool, region, start, &stamps[done..done + count]);
            if let Some((promise, words)) = trespass {
                self.fail(promise, words);
                return;
            }
            let Some(body) = self.nodes[node].body.as_mut() else {
                return;
            };
            let pool = &mut body.pools[pool];
            pool.stamp[region][start..start + count].copy_from_slice(&stamps[done..done + count]);
            let placed = pool.regions[region].copy_in(segment.offset, &bytes[done..done + count]);
            if let Err(error) = placed {
                self.fail(
                    "5 only the granted",
                    format!("node {node} writes outside a region: {error}"),
                );
                return;
            }
            done += count;
        }
        if done != bytes.len() {
            self.fail(
                "plan",
                format!("a destination stream took {done} of {} bytes", bytes.len()),
            );
        }
    }

    fn trespass(
        &self,
        node: NodeIndex,
        pool: usize,
        region: usize,
        start: usize,
        stamps: &[Stamp],
    ) -> Option<(&'static str, String)> {
        let body = self.nodes[node].body.as_ref()?;
        let owners = body.pools[pool].owner[region].get(start..start + stamps.len())?;
        let mut last = (0, 0);
        for (index, (owner, stamp)) in owners.iter().zip(stamps).enumerate() {
            if (*owner, *stamp) == last {
                continue;
            }
            last = (*owner, *stamp);
            let record = &self.ledger[*owner as usize];
            let place = || format!("node {node}, region {region}, byte {}", start + index);
            if *owner == 0 || record.is_source() {
                let promise = if *owner == 0 {
                    "2 no late write"
                } else {
                    "5 only the granted"
                };
                return Some((
                    promise,
                    format!(
                        "a byte of {} lands in {} of {}",
                        self.describe_stamp(*stamp),
                        place(),
                        self.describe(*owner)
                    ),
                ));
            }
            if record.quarantined {
                continue;
            }
            if record.ended.is_some() || record.arrived.is_some() {
                return Some((
                    "2 no late write",
                    format!("a byte lands in {} after the end of {}", place(), self.describe(*owner)),
                ));
            }
            if !self.accepts(*owner, *stamp) {
                return Some((
                    "2 no late write",
                    format!(
                        "a byte of {} lands in {}, which is granted to {}",
                        self.describe_stamp(*stamp),
                        place(),
                        self.describe(*owner)
                    ),
                ));
            }
        }
        None
    }

    /// Whether bytes with this stamp may be placed for this destination.
    pub(crate) fn accepts(&self, destination: Serial, stamp: Stamp) -> bool {
        if stamp == FILLER {
            return true;
        }
        let Some(source) = self.stamps.get(stamp as usize).map(|stamp| stamp.serial) else {
            return false;
        };
        if source == 0 {
            return false;
        }
        match (
            &self.ledger[destination as usize].what,
            &self.ledger[source as usize].what,
        ) {
            (What::Claim(claim), What::Offer(offer)) => {
                claim.key == offer.key && claim.sources.contains(&offer.incarnation)
            }
            (What::Grant { name, .. }, What::Push { grant, .. }) => name == grant,
            (What::Pull { grant }, What::ReadGrant { name }) => name == grant,
            _ => false,
        }
    }

    pub(crate) fn describe(&self, serial: Serial) -> String {
        if serial == 0 {
            return "nobody".into();
        }
        let record = &self.ledger[serial as usize];
        let state = match (&record.ended, record.died) {
            (Some((at, Ok(_))), _) => format!("ended well at {:.6}", seconds(*at)),
            (Some((at, Err(error))), _) => format!("ended {} at {:.6}", error.kind(), seconds(*at)),
            (None, Some(at)) => format!("its process died at {:.6}", seconds(at)),
            (None, None) => "open".into(),
        };
        format!(
            "{} #{serial} of node {}.{} ({state})",
            record.kind(),
            record.node,
            record.life
        )
    }

    pub(crate) fn describe_stamp(&self, stamp: Stamp) -> String {
        match self.stamps.get(stamp as usize) {
            Some(of) => format!("attempt {} of {}", of.attempt, self.describe(of.serial)),
            None => "filler".into(),
        }
    }

    /// What a source's bytes are.
    pub(crate) fn content_of(&self, serial: Serial, attempt: u32) -> Content {
        match &self.ledger[serial as usize].what {
            What::Offer(offer) => {
                let mut key = offer.key.clone();
                key.extend_from_slice(&(offer.request as u64).to_le_bytes());
                Content::new(&key, attempt)
            }
            _ => Content::new(&serial.to_le_bytes(), attempt),
        }
    }

    pub(crate) fn stamp(&mut self, serial: Serial, attempt: u32) -> Stamp {
        let known = self
            .stamps
            .iter()
            .rposition(|of| of.serial == serial && of.attempt == attempt);
        known.unwrap_or_else(|| {
            self.stamps.push(StampOf { serial, attempt });
            self.stamps.len() - 1
        }) as Stamp
    }

    /// A source's application writes its bytes, but for those that a kernel writes later.
    pub(crate) fn write_source(&mut self, serial: Serial, tokens: std::ops::Range<u32>, layers: std::ops::Range<u16>) {
        self.write_where(serial, tokens, layers, 0);
    }

    /// A kernel has written the bytes that its event guards.
    pub(crate) fn write_sealed(&mut self, serial: Serial, event: u32) {
        self.write_where(serial, 0..u32::MAX, 0..u16::MAX, event);
    }

    fn write_where(&mut self, serial: Serial, tokens: std::ops::Range<u32>, layers: std::ops::Range<u16>, sealed: u32) {
        let record = &self.ledger[serial as usize];
        let attempt = match &record.what {
            What::Offer(offer) => offer.attempt,
            _ => 0,
        };
        let (node, pool, shape) = (record.node, record.pool, record.shape.clone());
        let content = self.content_of(serial, attempt);
        let stamp = self.stamp(serial, attempt);
        let Some(body) = self.nodes[node].body.as_mut() else {
            return;
        };
        let pool = &mut body.pools[pool];
        let layout = Arc::clone(&pool.layout);
        match &shape {
            Shape::Selection(selection) => {
                let mut bytes = Vec::new();
                pattern::for_each_run(&layout, selection, tokens, layers, |run| {
                    let (region, offset) = (run.region as usize, run.offset as usize);
                    if pool.sealed[region][offset] != sealed {
                        return;
                    }
                    bytes.resize(run.length as usize, 0);
                    content.generate(&layout, run, &mut bytes);
                    // Inside the region, since the layout was validated against it.
                    let _ = pool.regions[region].copy_in(run.offset, &bytes);
                    pool.stamp[region][offset..offset + bytes.len()].fill(stamp);
                    pool.sealed[region][offset..offset + bytes.len()].fill(0);
                });
            }
            Shape::Descriptors(pieces) => {
                let mut position = 0;
                for (region, offset, length) in descriptor_runs(&layout, pieces) {
                    let bytes: Vec<u8> = (0..length)
                        .map(|index| descriptor_byte(serial, position + index))
                        .collect();
                    position += length;
                    // As above.
                    let _ = pool.regions[region].copy_in(offset, &bytes);
                    let span = offset as usize..(offset + length) as usize;
                    pool.stamp[region][span.clone()].fill(stamp);
                    pool.sealed[region][span].fill(0);
                }
            }
        }
    }

    /// Gives a handle's blocks to an owner: itself when it gets them, nobody when it has ended.
    pub(crate) fn give_blocks(&mut self, serial: Serial, group: usize, blocks: &[BlockId]) {
        let salt = self.rng.next_u64();
        let record = &mut self.ledger[serial as usize];
        let (node, pool) = (record.node, record.pool);
        if record.blocks.len() <= group {
            record.blocks.resize(group + 1, Vec::new());
        }
        record.blocks[group].extend_from_slice(blocks);
        if let Some(body) = self.nodes[node].body.as_mut() {
            body.pools[pool].give(group, blocks, serial, salt);
        }
    }

    /// Returns all blocks of a handle to the allocator, where the next request finds them first.
    pub(crate) fn release_blocks(&mut self, serial: Serial) {
        let salt = self.rng.next_u64();
        let record = &mut self.ledger[serial as usize];
        if record.released {
            return;
        }
        record.released = true;
        let (node, pool, life) = (record.node, record.pool, record.life);
        let blocks = std::mem::take(&mut record.blocks);
        if self.nodes[node].life != life {
            return;
        }
        if let Some(body) = self.nodes[node].body.as_mut() {
            for (group, blocks) in blocks.iter().enumerate() {
                body.pools[pool].take_back(group, blocks, salt);
            }
        }
    }

    /// Returns some blocks that a handle no longer has.
    pub(crate) fn free_blocks(&mut self, serial: Serial, blocks: &[Vec<BlockId>]) {
        let salt = self.rng.next_u64();
        let record = &self.ledger[serial as usize];
        let (node, pool, life) = (record.node, record.pool, record.life);
        if self.nodes[node].life != life {
            return;
        }
        if let Some(body) = self.nodes[node].body.as_mut() {
            for (group, blocks) in blocks.iter().enumerate() {
                body.pools[pool].take_back(group, blocks, salt);
            }
        }
    }

    /// The blocks a selection of `tokens` needs, taken from the pool's allocator.
    pub(crate) fn allocate_selection(
        &mut self,
        node: NodeIndex,
        pool: usize,
        tokens: std::ops::Range<u32>,
        states: bool,
    ) -> Option<Selection> {
        let body = self.nodes[node].body.as_mut()?;
        let pool = &mut body.pools[pool];
        let needs: Vec<(u32, u32, usize)> = pool
            .layout
            .cache_groups()
            .iter()
            .map(|group| {
                let per_block = group.geometry.tokens_per_block;
                if per_block == 0 {
                    return (0, 0, usize::from(states));
                }
                if tokens.is_empty() {
                    return (tokens.start, tokens.start, 0);
                }
                let count = tokens.end.div_ceil(per_block) - tokens.start / per_block;
                (tokens.start, tokens.end, count as usize)
            })
            .collect();
        if needs
            .iter()
            .enumerate()
            .any(|(group, need)| pool.free_blocks(group) < need.2)
        {
            return None;
        }
        let mut selection = Selection::default();
        let mut any_reused = false;
        for (group, (first_token, token_end, count)) in needs.into_iter().enumerate() {
            let (blocks, reused) = pool.allocate(group, count)?;
            any_reused |= reused;
            selection.groups.push(kvxfer_core::layout::GroupSelection {
                first_token,
                token_end,
                blocks,
            });
        }
        if any_reused {
            self.coverage.reach(super::coverage::Point::BlocksReused);
        }
        Some(selection)
    }
}

pub(crate) fn seconds(time: kvxfer_core::Time) -> f64 {
    time.as_nanos() as f64 / 1e9
}

//! What the flow tests share: a target of layers and tokens without a pool, and its streams.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::sync::Arc;

use kvxfer_core::error::{Error, ErrorKind, Result};
use kvxfer_core::flow::{ByteStream, PartExtent, SlotTable, SlotTarget, SlotWatcher};
use kvxfer_core::memory::Segment;
use kvxfer_core::{Generation, Incarnation, PoolId, SlotId};

/// `layers` times `tokens` cells of `cell` bytes, and `state` bytes of state for each layer, in one region.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    pub layers: u16,
    pub tokens: u32,
    pub cell: u64,
    pub state: u64,
}

impl Grid {
    pub fn total(&self) -> u64 {
        u64::from(self.layers) * (u64::from(self.tokens) * self.cell + self.state)
    }

    pub fn stream_of(&self, extent: PartExtent) -> GridStream {
        GridStream {
            grid: *self,
            tokens: (extent.token_start.min(self.tokens), extent.token_end.min(self.tokens)),
            layers: (extent.layer_start.min(self.layers), extent.layer_end.min(self.layers)),
            states: extent.states,
        }
    }

    /// Four parts that cover the grid, split at this token (not the first) and layer. Some may be empty.
    pub fn quarters(&self, token: u32, layer: u16) -> Vec<PartExtent> {
        let mut parts = Vec::new();
        for (layer_start, layer_end) in [(0, layer), (layer, self.layers)] {
            for (token_start, token_end) in [(0, token), (token, self.tokens)] {
                parts.push(PartExtent {
                    token_start,
                    token_end,
                    layer_start,
                    layer_end,
                    states: token_start == 0,
                });
            }
        }
        parts
    }
}

impl SlotTarget for Grid {
    fn bytes(&self) -> Result<u64> {
        Ok(self.total())
    }

    fn layers(&self) -> u16 {
        self.layers
    }

    fn stream(&self, extent: PartExtent) -> Result<Arc<dyn ByteStream>> {
        if extent.token_start > self.tokens {
            return Err(Error::new(ErrorKind::OutOfBounds, "tokens"));
        }
        Ok(Arc::new(self.stream_of(extent)))
    }
}

#[derive(Debug, Clone, Copy)]
pub struct GridStream {
    grid: Grid,
    tokens: (u32, u32),
    layers: (u16, u16),
    states: bool,
}

impl GridStream {
    /// Where the stream's byte is in the region.
    pub fn place(&self, offset: u64) -> u64 {
        let row = u64::from(self.tokens.1 - self.tokens.0) * self.grid.cell;
        let per_layer = row + if self.states { self.grid.state } else { 0 };
        let layer = u64::from(self.layers.0) + offset / per_layer;
        let inside = offset % per_layer;
        let layer_bytes = u64::from(self.grid.tokens) * self.grid.cell + self.grid.state;
        let base = layer * layer_bytes;
        if inside < row {
            base + u64::from(self.tokens.0) * self.grid.cell + inside
        } else {
            base + u64::from(self.grid.tokens) * self.grid.cell + (inside - row)
        }
    }
}

impl ByteStream for GridStream {
    fn length(&self) -> u64 {
        let row = u64::from(self.tokens.1.saturating_sub(self.tokens.0)) * self.grid.cell;
        let states = if self.states { self.grid.state } else { 0 };
        u64::from(self.layers.1.saturating_sub(self.layers.0)) * (row + states)
    }

    fn segments(&self, offset: u64, length: u64, segments_max: usize, out: &mut Vec<Segment>) -> u64 {
        let end = (offset + length).min(self.length());
        let mut at = offset;
        while at < end && out.len() < segments_max {
            // Byte by byte is slow and obviously right.
            let place = self.place(at);
            let mut run = 1;
            while at + run < end && self.place(at + run) == place + run {
                run += 1;
            }
            out.push(Segment {
                region: 0,
                offset: place,
                length: run,
            });
            at += run;
        }
        at - offset
    }
}

pub fn open(
    table: &SlotTable,
    grid: Grid,
    writer: Option<Incarnation>,
    watcher: Option<Arc<dyn SlotWatcher>>,
) -> (SlotId, Generation) {
    table
        .open_target(Box::new(grid), Arc::new([]), writer, PoolId(1), watcher)
        .unwrap()
}

/// A small deterministic source of numbers (splitmix64).
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `end`, which is not zero.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

//! Verification bytes: what a cache holds is a function of (key, attempt, layer, kind, head, token, element).
//!
//! The function knows nothing of layouts, so that the same token of the same head has the same bytes in every pool,
//! whatever its inner order, tokens per block or ranks; a copy is right exactly if the destination's bytes are those.
//! Bytes inside packed runs and states are counted from the beginning of the head's run (packed order is unknown, and
//! the same on both sides).

use std::ops::Range;
use std::sync::Arc;

use kvxfer_core::layout::{Axis, HeadRange, InnerOrder, Plane, PlaneKind, PoolLayout, Selection};
use kvxfer_core::memory::Region;
use kvxfer_core::{Error, ErrorKind, Result};

use crate::rng::mix;
use crate::touch;

/// Whose bytes: a request's key and the attempt at it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Content {
    seed: u64,
}

impl Content {
    /// The content of this key at this attempt.
    pub fn new(key: &[u8], attempt: u32) -> Content {
        Content {
            seed: hash(key, u64::from(attempt) + 1),
        }
    }

    /// What destinations hold before: no content has these bytes, except by chance.
    pub fn poison(salt: u64) -> Content {
        Content {
            seed: mix(salt ^ 0x0070_6f69_736f_6e21),
        }
    }

    /// Fills `bytes` with what the run holds.
    pub fn generate(&self, layout: &PoolLayout, run: &Run, bytes: &mut [u8]) {
        let seed = self.run_seed(layout, run);
        let mut position = u64::from(run.first_byte);
        let mut rest = bytes;
        while !rest.is_empty() {
            let word = mix(seed.wrapping_add(position / 8)).to_le_bytes();
            let from = (position % 8) as usize;
            let count = (8 - from).min(rest.len());
            rest[..count].copy_from_slice(&word[from..from + count]);
            position += count as u64;
            rest = &mut rest[count..];
        }
    }

    /// The first byte of `bytes` that is not what the run holds.
    pub fn first_difference(&self, layout: &PoolLayout, run: &Run, bytes: &[u8]) -> Option<usize> {
        let mut buffer = [0u8; 512];
        let mut piece = *run;
        for (index, part) in bytes.chunks(buffer.len()).enumerate() {
            piece.first_byte = run.first_byte + (index * buffer.len()) as u32;
            let expected = &mut buffer[..part.len()];
            self.generate(layout, &piece, expected);
            if expected != part {
                let inside = expected.iter().zip(part).position(|(a, b)| a != b).unwrap_or(0);
                return Some(index * 512 + inside);
            }
        }
        None
    }

    fn run_seed(&self, layout: &PoolLayout, run: &Run) -> u64 {
        let layer = hash(layout.layers()[run.layer as usize].as_bytes(), u64::from(run.kind));
        mix(self.seed ^ mix(layer ^ mix((u64::from(run.head) << 32) | u64::from(run.token))))
    }
}

/// A stretch of memory that belongs to one token of one head of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Region of the pool.
    pub region: u32,
    /// First byte in the region.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
    /// Layer, as an index in the pool's list.
    pub layer: u16,
    /// 0 K, 1 V, 2 latent, 3 state, 4 and more packed (by plane kind).
    pub kind: u8,
    /// The head, counted over the model; `u32::MAX` where there are none.
    pub head: u32,
    /// The token's position in the request; 0 in states.
    pub token: u32,
    /// The first byte, counted from the token's first element (or the packed run's, or the state's).
    pub first_byte: u32,
}

/// Calls `each` for every stretch of the selection, restricted to `tokens` and `layers`. State blocks belong to every
/// token range.
pub fn for_each_run(
    layout: &PoolLayout,
    selection: &Selection,
    tokens: Range<u32>,
    layers: Range<u16>,
    mut each: impl FnMut(&Run),
) {
    for plane in layout.planes().iter().filter(|plane| layers.contains(&plane.layer)) {
        let Some(chosen) = selection.groups.get(plane.group as usize) else {
            continue;
        };
        let geometry = layout.cache_groups()[plane.group as usize].geometry;
        let per_block = geometry.tokens_per_block;
        for (index, block) in chosen.blocks.iter().enumerate() {
            let base = plane.base + u64::from(*block) * plane.stride;
            if per_block == 0 {
                per_head(plane, base, 0, |run| each(&run));
                continue;
            }
            let block_start = (chosen.first_token / per_block + index as u32) * per_block;
            let meant = chosen.first_token.max(tokens.start)..chosen.token_end.min(tokens.end);
            if plane.order == InnerOrder::Packed {
                if meant.start < block_start + per_block && block_start < meant.end {
                    per_head(plane, base, block_start, |run| each(&run));
                }
                continue;
            }
            let mut inside = Inside {
                plane,
                element_bytes: geometry.dtype.bytes() as u32,
                sizes: [geometry.head_size, geometry.value_head_size],
                per_block,
                offset: base,
            };
            let mut cell = Cell {
                kv: match plane.kind {
                    PlaneKind::Value => 1,
                    _ => 0,
                },
                head: plane.heads.map_or(u32::MAX, |heads| heads.start),
                token: 0,
                element: 0,
            };
            inside.walk(plane.order.axes(), &mut cell, &mut |mut run: Run| {
                run.token += block_start;
                if meant.contains(&run.token) {
                    each(&run);
                }
            });
        }
    }
}

/// Writes the content into the selection's blocks.
///
/// # Errors
/// `OutOfBounds` if the layout does not fit the regions.
pub fn fill(
    layout: &PoolLayout,
    regions: &[Arc<Region>],
    selection: &Selection,
    tokens: Range<u32>,
    layers: Range<u16>,
    content: Content,
) -> Result<()> {
    let mut buffer = Vec::new();
    let mut outcome = Ok(());
    for_each_run(layout, selection, tokens, layers, |run| {
        if outcome.is_ok() {
            buffer.resize(run.length as usize, 0);
            content.generate(layout, run, &mut buffer);
            outcome = region(regions, run).and_then(|region| touch::put(region, run.offset, &buffer));
        }
    });
    outcome
}

/// Checks that the selection's blocks hold the content; says how many bytes were checked.
///
/// # Errors
/// `Corrupt`, naming the first wrong byte; `OutOfBounds` if the layout does not fit the regions.
pub fn verify(
    layout: &PoolLayout,
    regions: &[Arc<Region>],
    selection: &Selection,
    tokens: Range<u32>,
    layers: Range<u16>,
    content: Content,
) -> Result<u64> {
    let mut buffer = Vec::new();
    let mut checked = Ok(0);
    for_each_run(layout, selection, tokens, layers, |run| {
        if let Ok(bytes) = checked {
            buffer.resize(run.length as usize, 0);
            checked = region(regions, run)
                .and_then(|region| touch::get(region, run.offset, &mut buffer))
                .and_then(|()| match content.first_difference(layout, run, &buffer) {
                    None => Ok(bytes + u64::from(run.length)),
                    Some(at) => Err(wrong_byte(layout, run, at)),
                });
        }
    });
    checked
}

/// Fills whole blocks with bytes that no content has.
///
/// # Errors
/// `OutOfBounds` if the layout does not fit the regions.
pub fn poison(layout: &PoolLayout, regions: &[Arc<Region>], selection: &Selection, salt: u64) -> Result<()> {
    for plane in layout.planes() {
        let Some(chosen) = selection.groups.get(plane.group as usize) else {
            continue;
        };
        let bytes: Vec<u8> = (0..plane.block_length.div_ceil(8))
            .flat_map(|word| mix(salt ^ mix(word)).to_le_bytes())
            .take(plane.block_length as usize)
            .collect();
        for block in &chosen.blocks {
            let offset = plane.base + u64::from(*block) * plane.stride;
            let region = regions
                .get(plane.region as usize)
                .ok_or_else(|| no_region(plane.region, regions.len()))?;
            touch::put(region, offset, &bytes)?;
        }
    }
    Ok(())
}

fn region<'a>(regions: &'a [Arc<Region>], run: &Run) -> Result<&'a Arc<Region>> {
    regions
        .get(run.region as usize)
        .ok_or_else(|| no_region(run.region, regions.len()))
}

fn no_region(region: u32, regions: usize) -> Error {
    Error::new(ErrorKind::OutOfBounds, format!("region {region}")).because(format!("the pool has {regions} regions"))
}

fn wrong_byte(layout: &PoolLayout, run: &Run, at: usize) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        format!(
            "byte {} of token {} of layer {}, kind {}, head {}",
            run.first_byte as usize + at,
            run.token,
            layout.layers()[run.layer as usize],
            run.kind,
            run.head,
        ),
    )
    .at(format!("region {} offset {}", run.region, run.offset + at as u64))
    .because("the byte in memory is not the one that was sent")
}

/// Packed blocks and states: one run of bytes per head.
fn per_head(plane: &Plane, base: u64, token: u32, mut each: impl FnMut(Run)) {
    let heads = plane.heads.unwrap_or(HeadRange::new(u32::MAX, u32::MAX));
    let count = heads.count().max(1);
    let length = (plane.block_length / u64::from(count)) as u32;
    for head in 0..count {
        each(Run {
            region: plane.region,
            offset: base + u64::from(head) * u64::from(length),
            length,
            layer: plane.layer,
            kind: match plane.kind {
                PlaneKind::State => 3,
                PlaneKind::Key => 4,
                PlaneKind::Value => 5,
                _ => 6,
            },
            head: heads.start.saturating_add(head),
            token,
            first_byte: 0,
        });
    }
}

#[derive(Clone, Copy)]
struct Cell {
    kv: u32,
    head: u32,
    token: u32,
    element: u32,
}

/// The inside of one block, walked in address order.
struct Inside<'a> {
    plane: &'a Plane,
    element_bytes: u32,
    sizes: [u32; 2],
    per_block: u32,
    offset: u64,
}

impl Inside<'_> {
    fn walk(&mut self, axes: &[Axis], cell: &mut Cell, each: &mut dyn FnMut(Run)) {
        let elements = self.sizes[cell.kv as usize];
        match axes {
            [] => self.emit(cell, 1, each),
            [Axis::Dim] => self.emit(cell, elements, each),
            [Axis::Dim, inner @ ..] => {
                for element in 0..elements {
                    cell.element = element;
                    self.walk(inner, cell, each);
                }
                cell.element = 0;
            }
            [Axis::Token, inner @ ..] => {
                for token in 0..self.per_block {
                    cell.token = token;
                    self.walk(inner, cell, each);
                }
            }
            [Axis::Head, inner @ ..] => {
                let heads = self.plane.heads.unwrap_or(HeadRange::new(0, 1));
                for head in heads.start..heads.end {
                    cell.head = head;
                    self.walk(inner, cell, each);
                }
            }
            [Axis::Kv, inner @ ..] => {
                for kv in 0..2 {
                    cell.kv = kv;
                    self.walk(inner, cell, each);
                }
                cell.kv = 0;
            }
        }
    }

    fn emit(&mut self, cell: &Cell, elements: u32, each: &mut dyn FnMut(Run)) {
        let length = elements * self.element_bytes;
        each(Run {
            region: self.plane.region,
            offset: self.offset,
            length,
            layer: self.plane.layer,
            kind: match self.plane.kind {
                PlaneKind::Latent => 2,
                _ => cell.kv as u8,
            },
            head: cell.head,
            token: cell.token,
            first_byte: cell.element * self.element_bytes,
        });
        self.offset += u64::from(length);
    }
}

fn hash(bytes: &[u8], salt: u64) -> u64 {
    bytes.iter().fold(mix(salt ^ (bytes.len() as u64) << 32), |sum, byte| {
        mix(sum ^ u64::from(*byte))
    })
}

#[cfg(test)]
mod tests {
    use kvxfer_core::layout::{DType, Geometry, PlaneSpec, Sharding};

    use super::*;

    fn pool(per_block: u32, rank: u16, size: u16, order: InnerOrder) -> (PoolLayout, Vec<Arc<Region>>) {
        let mut builder = PoolLayout::builder();
        let sharding = Sharding::Heads { rank, size };
        let group = builder.group(
            "attention",
            Geometry::attention(DType::F16, per_block, 4, 6, sharding),
            8,
        );
        for layer in 0..2 {
            if order.axes().len() == 4 {
                builder.plane(PlaneSpec::new(group, layer.to_string(), PlaneKind::Fused).order(order));
                continue;
            }
            for kind in [PlaneKind::Key, PlaneKind::Value] {
                builder.plane(PlaneSpec::new(group, layer.to_string(), kind).order(order));
            }
        }
        let layout = builder.build().unwrap();
        let regions = layout
            .region_lengths()
            .iter()
            .map(|length| Region::allocate(*length).unwrap())
            .collect();
        (layout, regions)
    }

    /// All bytes by what they mean.
    fn meaning(
        layout: &PoolLayout,
        regions: &[Arc<Region>],
        selection: &Selection,
    ) -> Vec<(u16, u8, u32, u32, Vec<u8>)> {
        let mut cells = Vec::new();
        for_each_run(layout, selection, 0..u32::MAX, 0..u16::MAX, |run| {
            let mut bytes = vec![0; run.length as usize];
            regions[run.region as usize].copy_out(run.offset, &mut bytes).unwrap();
            cells.push((run.layer, run.kind, run.head, run.token, bytes));
        });
        cells.sort();
        cells
    }

    #[test]
    fn the_same_token_has_the_same_bytes_in_every_layout() {
        let content = Content::new(b"r-17", 0);
        let filled = |per_block: u32, rank, size, order, blocks: Vec<u32>| {
            let (layout, regions) = pool(per_block, rank, size, order);
            let selection = Selection::single(0, 8, blocks);
            fill(&layout, &regions, &selection, 0..8, 0..2, content).unwrap();
            assert!(verify(&layout, &regions, &selection, 0..8, 0..2, content).unwrap() > 0);
            meaning(&layout, &regions, &selection)
        };
        let nhd = filled(4, 0, 1, InnerOrder::NHD, vec![5, 2]);
        assert_eq!(nhd, filled(2, 0, 1, InnerOrder::HND, vec![7, 1, 0, 3]));
        assert_eq!(nhd, filled(8, 0, 1, InnerOrder::KV_HND, vec![6]));
        let mut halves = filled(4, 0, 2, InnerOrder::NHD, vec![1, 2]);
        halves.extend(filled(4, 1, 2, InnerOrder::HND, vec![3, 4]));
        halves.sort();
        assert_eq!(nhd, halves);
    }

    #[test]
    fn a_single_wrong_byte_is_found() {
        let (layout, regions) = pool(4, 0, 1, InnerOrder::KV_NHD);
        let selection = Selection::single(1, 7, vec![5, 2]);
        let content = Content::new(b"r-17", 1);
        poison(&layout, &regions, &selection, 9).unwrap();
        assert!(verify(&layout, &regions, &selection, 0..8, 0..2, content).is_err());
        fill(&layout, &regions, &selection, 0..8, 0..2, content).unwrap();
        let bytes = verify(&layout, &regions, &selection, 0..8, 0..2, content).unwrap();
        assert_eq!(
            bytes,
            2 * 2 * 4 * 6 * 2 * 6,
            "layers, K and V, heads, tokens, bytes, elements"
        );
        assert!(verify(&layout, &regions, &selection, 0..8, 0..2, Content::new(b"r-17", 2)).is_err());
        let mut byte = [0];
        let (region, offset) = layout.plane_offset(1, 2).unwrap();
        regions[region as usize].copy_out(offset, &mut byte).unwrap();
        regions[region as usize].copy_in(offset, &[byte[0] ^ 1]).unwrap();
        let wrong = verify(&layout, &regions, &selection, 0..8, 0..2, content).unwrap_err();
        assert_eq!(wrong.kind(), ErrorKind::Corrupt);
    }
}

//! What is moved: pool shapes, and the blocks of a request in them.

use kvxfer_core::layout::{Arrangement, GroupSelection, Model, PoolLayout, Selection};
use kvxfer_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::rng::SplitMix64;

/// The seed of the scattered block lists, the same for every run so that runs compare.
const SCATTER_SEED: u64 = 20_240_607;

/// Bytes that a stamp covers: each repetition writes a fresh stamp per unit of every source block.
pub const STAMP_UNIT_BYTES: usize = 64 << 10;

/// A pool of equal planes, one after another in one region, each an array of blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Planes (two per layer for separate K and V, else one per layer).
    pub planes: u32,
    /// Blocks per plane.
    pub blocks: u32,
    /// Bytes per block.
    pub block_bytes: u64,
    /// Whose cache it is; blocks of raw bytes if nobody's.
    pub model: Option<ModelShape>,
}

/// A model's cache on one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelShape {
    /// The preset's name.
    pub name: String,
    /// Tensor-parallel size.
    pub tensor_size: u16,
}

/// Tokens per block of the model workloads.
pub const TOKENS_PER_BLOCK: u32 = 16;

impl ModelShape {
    /// The layout of rank 0 with so many blocks.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown model or ranks that do not divide its heads.
    pub fn layout(&self, blocks: u32) -> Result<PoolLayout> {
        let model = Model::preset(&self.name)?;
        model.layout(
            0,
            self.tensor_size,
            TOKENS_PER_BLOCK,
            blocks,
            Arrangement::PER_LAYER_NHD,
        )
    }
}

impl Shape {
    /// Bytes of the whole pool.
    pub fn bytes(&self) -> u64 {
        u64::from(self.planes) * u64::from(self.blocks) * self.block_bytes
    }

    /// The library's description of it.
    ///
    /// # Errors
    /// `InvalidArgument` for what no pool can be.
    pub fn layout(&self) -> Result<PoolLayout> {
        let layout = match &self.model {
            Some(model) => model.layout(self.blocks)?,
            None => {
                let block_bytes = u32::try_from(self.block_bytes).map_err(|_| {
                    Error::new(
                        ErrorKind::InvalidArgument,
                        format!("blocks of {} bytes", self.block_bytes),
                    )
                    .because("a block has less than 4 GiB")
                    .remedy("give smaller --block-bytes or --pool-bytes")
                })?;
                PoolLayout::opaque(block_bytes, self.blocks)?
            }
        };
        // The baseline moves the same bytes only if both agree on where blocks are; in which order planes are declared is
        // no matter, because the same blocks are taken of all of them.
        let last = self.blocks.saturating_sub(1);
        let mut found: Vec<_> = (0..layout.planes().len())
            .map(|plane| layout.plane_offset(plane, last).ok())
            .collect();
        found.sort_unstable();
        let expected = (0..self.planes).map(|plane| Some((0, self.offset(plane, last))));
        let same = found.len() == self.planes as usize && found.into_iter().eq(expected);
        if same {
            Ok(layout)
        } else {
            Err(
                Error::new(ErrorKind::Unsupported, format!("workload of {:?}", self.model))
                    .because("its planes do not have equal blocks one after another")
                    .remedy("use another model, or --block-bytes and --blocks"),
            )
        }
    }

    /// First byte of a block in the region.
    pub fn offset(&self, plane: u32, block: u32) -> u64 {
        (u64::from(plane) * u64::from(self.blocks) + u64::from(block)) * self.block_bytes
    }
}

/// How block ids are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// A random choice, in random order, different on the two sides.
    Random,
    /// The first blocks, in order.
    Contiguous,
}

/// One workload: source blocks go to destination blocks, in every plane.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// Its name in results.
    pub name: String,
    /// The pool on either side.
    pub shape: Shape,
    /// Block ids at the source, in request order.
    pub source: Vec<u32>,
    /// Block ids at the destination.
    pub destination: Vec<u32>,
    /// Timed repetitions.
    pub reps: u32,
    /// Repetitions before those.
    pub warm: u32,
    /// Whether it is the ping-pong: one block with a message, there and back.
    pub ping_pong: bool,
}

impl Work {
    /// Pieces moved: blocks times planes.
    pub fn pieces(&self) -> u64 {
        self.source.len() as u64 * u64::from(self.shape.planes)
    }

    /// Bytes moved.
    pub fn bytes(&self) -> u64 {
        self.pieces() * self.shape.block_bytes
    }

    /// Bytes that one stamp covers.
    pub fn unit_bytes(&self) -> usize {
        let block = self.shape.block_bytes as usize;
        if block.is_multiple_of(STAMP_UNIT_BYTES) {
            STAMP_UNIT_BYTES
        } else {
            block
        }
    }

    /// The source's blocks as a selection in its layout.
    pub fn source_selection(&self, layout: &PoolLayout) -> Selection {
        selection(layout, &self.source)
    }

    /// The destination's.
    pub fn destination_selection(&self, layout: &PoolLayout) -> Selection {
        selection(layout, &self.destination)
    }

    /// Offsets of the source's pieces in its region, in the order of the stream: plane by plane.
    pub fn source_offsets(&self) -> Vec<u64> {
        offsets(&self.shape, &self.source)
    }

    /// Offsets of the destination's pieces in its region, in the same order.
    pub fn destination_offsets(&self) -> Vec<u64> {
        offsets(&self.shape, &self.destination)
    }
}

/// The named workloads of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Named {
    /// The whole pool in one piece.
    W1,
    /// 4,096 scattered blocks of 64 KiB.
    W2,
    /// 16,384 scattered blocks of 4 KiB.
    W3,
    /// One block of 4 KiB with a message, there and back.
    W4,
    /// Llama-3.1-70B at TP4, 2,048 tokens: 128 scattered blocks in 160 planes of 8 KiB.
    W5,
}

impl Named {
    /// Its name in results, as the comparison scripts write it.
    pub fn name(self) -> &'static str {
        match self {
            Named::W1 => "w1_1g",
            Named::W2 => "w2",
            Named::W3 => "w3",
            Named::W4 => "w4",
            Named::W5 => "w5",
        }
    }

    /// The workload in pools of `pool_bytes`; smaller pools than 1 GiB give proportionally smaller workloads.
    ///
    /// # Errors
    /// `InvalidArgument` if the pool is too small to scatter in.
    pub fn work(self, pool_bytes: u64) -> Result<Work> {
        let (planes, block_bytes, blocks_wanted, reps, warm) = match self {
            Named::W1 => (1, pool_bytes & !4095, 1, 7, 2),
            Named::W2 => (1, 64 << 10, 4096, 15, 3),
            Named::W3 => (1, 4 << 10, 16_384, 15, 3),
            Named::W4 => (1, 4 << 10, 1, 5, 1),
            Named::W5 => (160, 8 << 10, 128, 15, 3),
        };
        if pool_bytes < 4096 {
            return Err(too_small(self.name(), pool_bytes, 4096));
        }
        let mut per_plane = u32::try_from(pool_bytes / block_bytes / planes).map_err(|_| {
            Error::new(ErrorKind::InvalidArgument, format!("--pool-bytes {pool_bytes}"))
                .because("block ids have 32 bits")
                .remedy("give fewer --pool-bytes")
        })?;
        if self == Named::W5 {
            // 768 blocks per plane in 1 GiB, as in the comparison scripts: an engine's pool is not filled to the edge.
            per_plane = ((u128::from(pool_bytes) * 768) >> 30) as u32;
        }
        let count = match self {
            Named::W1 => 1,
            Named::W4 => per_plane.min(W4_BLOCKS_MAX),
            Named::W5 => blocks_wanted.min(per_plane / 2),
            _ => blocks_wanted.min(per_plane / 4),
        };
        if count == 0 {
            return Err(too_small(self.name(), pool_bytes, 4 * block_bytes * planes));
        }
        let mut random = SplitMix64::new(SCATTER_SEED);
        Ok(Work {
            name: self.name().to_owned(),
            shape: Shape {
                planes: planes as u32,
                blocks: per_plane,
                block_bytes,
                model: (self == Named::W5).then(|| ModelShape {
                    name: "llama-3.1-70b".into(),
                    tensor_size: 4,
                }),
            },
            source: random.permutation(per_plane, count),
            destination: random.permutation(per_plane, count),
            reps,
            warm,
            ping_pong: self == Named::W4,
        })
    }
}

/// Blocks that the ping-pong rotates through, so that a round's grants name distinct blocks.
pub const W4_BLOCKS_MAX: u32 = 256;

/// Blocks of one's own size and number.
///
/// # Errors
/// `InvalidArgument` if they do not fit the pool.
pub fn custom(pool_bytes: u64, block_bytes: u64, blocks: u32, pattern: Pattern) -> Result<Work> {
    if block_bytes == 0 || !block_bytes.is_multiple_of(8) {
        return Err(
            Error::new(ErrorKind::InvalidArgument, format!("--block-bytes {block_bytes}"))
                .because("a block is a positive multiple of 8 bytes, so that every word of it can be checked")
                .remedy("give a multiple of 8"),
        );
    }
    let shape = Shape {
        planes: 1,
        blocks,
        block_bytes,
        model: None,
    };
    planar("blocks".into(), pool_bytes, shape, pattern)
}

/// One request of a model: all planes of the blocks that hold `tokens`.
///
/// # Errors
/// `InvalidArgument` for an unknown model, ranks that do not divide its heads, or a pool that is too small.
pub fn model(pool_bytes: u64, name: &str, tensor_size: u16, tokens: u32, pattern: Pattern) -> Result<Work> {
    let model = ModelShape {
        name: name.to_owned(),
        tensor_size,
    };
    let layout = model.layout(1)?;
    let shape = Shape {
        planes: layout.planes().len() as u32,
        blocks: tokens.div_ceil(TOKENS_PER_BLOCK),
        block_bytes: layout.planes().first().map_or(0, |plane| plane.block_length),
        model: Some(model),
    };
    planar(format!("{name}_tp{tensor_size}_{tokens}"), pool_bytes, shape, pattern)
}

/// Chooses blocks in a pool that is as large as allowed; `shape.blocks` says how many.
fn planar(name: String, pool_bytes: u64, mut shape: Shape, pattern: Pattern) -> Result<Work> {
    let wanted = shape.blocks;
    if wanted == 0 {
        return Err(Error::new(ErrorKind::InvalidArgument, "a workload of 0 blocks")
            .because("there is nothing to move")
            .remedy("give --blocks or --tokens at least 1"));
    }
    let per_block_id = shape.block_bytes.saturating_mul(u64::from(shape.planes)).max(1);
    shape.blocks = u32::try_from(pool_bytes / per_block_id).unwrap_or(u32::MAX);
    if shape.blocks < wanted {
        return Err(too_small(
            &name,
            pool_bytes,
            per_block_id.saturating_mul(u64::from(wanted)),
        ));
    }
    let per_plane = shape.blocks;
    let mut random = SplitMix64::new(SCATTER_SEED);
    let mut choose = || match pattern {
        Pattern::Random => random.permutation(per_plane, wanted),
        Pattern::Contiguous => (0..wanted).collect(),
    };
    let work = Work {
        name,
        source: choose(),
        destination: choose(),
        shape,
        reps: 15,
        warm: 3,
        ping_pong: false,
    };
    work.shape.layout()?;
    Ok(work)
}

/// Whole blocks, the same ids in every cache group.
pub fn selection(layout: &PoolLayout, blocks: &[u32]) -> Selection {
    let groups = layout.cache_groups().iter().map(|group| GroupSelection {
        first_token: 0,
        token_end: blocks.len() as u32 * group.geometry.tokens_per_block,
        blocks: blocks.to_vec(),
    });
    Selection {
        groups: groups.collect(),
    }
}

fn offsets(shape: &Shape, blocks: &[u32]) -> Vec<u64> {
    (0..shape.planes)
        .flat_map(|plane| blocks.iter().map(move |&block| shape.offset(plane, block)))
        .collect()
}

fn too_small(name: &str, pool_bytes: u64, need: u64) -> Error {
    Error::new(
        ErrorKind::InvalidArgument,
        format!("workload {name} in a pool of {pool_bytes} bytes"),
    )
    .because(format!("it needs at least {need} bytes"))
    .remedy(format!("give --pool-bytes {need} or more, or fewer or smaller blocks"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_named_workloads_have_the_sizes_of_the_figures() {
        let gib = 1 << 30;
        let sizes = |named: Named| {
            let work = named.work(gib).unwrap();
            (work.pieces(), work.bytes(), work.shape.blocks)
        };
        assert_eq!(sizes(Named::W1), (1, gib, 1));
        assert_eq!(sizes(Named::W2), (4096, 4096 * 65536, 16_384));
        assert_eq!(sizes(Named::W3), (16_384, 16_384 * 4096, 262_144));
        assert_eq!(sizes(Named::W5), (20_480, 20_480 * 8192, 768));
    }

    #[test]
    fn small_pools_give_small_workloads_and_tiny_ones_an_error() {
        let work = Named::W5.work(64 << 20).unwrap();
        assert!(work.source.len() == 24 && work.shape.bytes() <= 64 << 20, "{work:?}");
        let error = Named::W5.work(1 << 20).unwrap_err().to_string();
        assert!(error.contains("w5") && error.contains("--pool-bytes"), "{error}");
        let error = custom(1 << 20, 4096, 1000, Pattern::Random).unwrap_err().to_string();
        assert!(error.contains("4096000"), "{error}");
        assert!(custom(1 << 20, 12, 1, Pattern::Random).is_err());
    }

    #[test]
    fn models_give_workloads() {
        let work = model(1 << 30, "llama-3.1-8b", 8, 1000, Pattern::Random).unwrap();
        assert_eq!(
            (work.shape.planes, work.shape.block_bytes, work.source.len()),
            (64, 4096, 63)
        );
        for name in ["deepseek-v3", "gemma-3-27b", "qwen3-32b"] {
            let work = model(1 << 30, name, 8, 100, Pattern::Contiguous).unwrap();
            let layout = work.shape.layout().unwrap();
            layout.check(&work.source_selection(&layout)).unwrap();
        }
        let error = model(1 << 30, "llama-9", 8, 100, Pattern::Random)
            .unwrap_err()
            .to_string();
        assert!(error.contains("llama-3.1-70b"), "{error}");
        assert!(model(1 << 30, "llama-3.1-8b", 3, 100, Pattern::Random).is_err());
    }

    #[test]
    fn every_workload_stays_inside_its_pool() {
        for named in [Named::W1, Named::W2, Named::W3, Named::W4, Named::W5] {
            for pool in [8 << 20, 100 << 20, (1 << 30) + 4096] {
                let work = named.work(pool).unwrap();
                assert!(work.shape.bytes() <= pool, "{named:?} in {pool}");
                for offset in work.source_offsets().into_iter().chain(work.destination_offsets()) {
                    assert!(offset + work.shape.block_bytes <= work.shape.bytes());
                }
            }
        }
    }
}

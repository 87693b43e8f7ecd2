//! What is moved: pool shapes, and the blocks of a request in them.

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
    /// Separate K and V planes: `planes` is even, and plane 2L is K of layer L.
    pub keys_and_values: bool,
}

impl Shape {
    /// Bytes of the whole pool.
    pub fn bytes(&self) -> u64 {
        u64::from(self.planes) * u64::from(self.blocks) * self.block_bytes
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
        if block.is_multiple_of(STAMP_UNIT_BYTES) { STAMP_UNIT_BYTES } else { block }
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
            Named::W4 => (1, 4 << 10, 1, 1, 0),
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
            per_plane = (u128::from(pool_bytes) * 768 >> 30) as u32;
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
                keys_and_values: self == Named::W5,
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
    planar("blocks", pool_bytes, 1, block_bytes, blocks, pattern, false)
}

/// A request of a model's shape: `blocks` block ids in each of `planes` planes.
///
/// # Errors
/// `InvalidArgument` if it does not fit the pool.
pub fn planar(
    name: &str,
    pool_bytes: u64,
    planes: u32,
    block_bytes: u64,
    blocks: u32,
    pattern: Pattern,
    keys_and_values: bool,
) -> Result<Work> {
    let bad = |what: String, why: &str, remedy: &str| {
        Err(Error::new(ErrorKind::InvalidArgument, what)
            .because(why)
            .remedy(remedy))
    };
    if blocks == 0 || planes == 0 {
        return bad(
            "a workload of 0 blocks".into(),
            "there is nothing to move",
            "give --blocks at least 1",
        );
    }
    if block_bytes == 0 || !block_bytes.is_multiple_of(8) {
        return bad(
            format!("--block-bytes {block_bytes}"),
            "a block is a positive multiple of 8 bytes, so that every word of it can be checked",
            "give a multiple of 8",
        );
    }
    let per_plane = u32::try_from(pool_bytes / block_bytes / u64::from(planes)).unwrap_or(u32::MAX);
    if per_plane < blocks {
        return Err(too_small(
            name,
            pool_bytes,
            block_bytes
                .saturating_mul(u64::from(planes))
                .saturating_mul(u64::from(blocks)),
        ));
    }
    let mut random = SplitMix64::new(SCATTER_SEED);
    let mut choose = || match pattern {
        Pattern::Random => random.permutation(per_plane, blocks),
        Pattern::Contiguous => (0..blocks).collect(),
    };
    Ok(Work {
        name: name.to_owned(),
        shape: Shape {
            planes,
            blocks: per_plane,
            block_bytes,
            keys_and_values,
        },
        source: choose(),
        destination: choose(),
        reps: 15,
        warm: 3,
        ping_pong: false,
    })
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

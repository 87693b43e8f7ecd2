//! The words a pool is declared in: element types, sharding, geometry, axes, planes and cache groups.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};

/// The type of one element of the cache. Only its size matters to a copy; its name is compared all the same, so that
/// eight-bit caches of different formats are not mistaken for one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DType {
    /// Raw bytes, also for formats that mix values and scales in one row.
    U8,
    /// Eight-bit integers.
    I8,
    /// Eight-bit floats with four exponent bits.
    F8E4M3,
    /// Eight-bit floats with five exponent bits.
    F8E5M2,
    /// IEEE half precision.
    F16,
    /// Brain floats.
    Bf16,
    /// IEEE single precision.
    F32,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            DType::U8 | DType::I8 | DType::F8E4M3 | DType::F8E5M2 => 1,
            DType::F16 | DType::Bf16 => 2,
            DType::F32 => 4,
        }
    }

    /// The name used in files and messages.
    pub const fn name(self) -> &'static str {
        match self {
            DType::U8 => "u8",
            DType::I8 => "i8",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::F32 => "f32",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Kv heads, half open, counted over the whole model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HeadRange {
    /// The first head.
    pub start: u32,
    /// One past the last head.
    pub end: u32,
}

impl HeadRange {
    /// The heads `start..end`.
    pub const fn new(start: u32, end: u32) -> Self {
        HeadRange { start, end }
    }

    /// Number of heads.
    pub const fn count(self) -> u32 {
        self.end.saturating_sub(self.start)
    }

    /// The heads that both hold; `None` if there are none.
    pub fn intersect(self, other: HeadRange) -> Option<HeadRange> {
        let range = HeadRange::new(self.start.max(other.start), self.end.min(other.end));
        (range.start < range.end).then_some(range)
    }
}

impl fmt::Display for HeadRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

/// How a cache group is divided among the ranks of its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Sharding {
    /// By kv heads. With more ranks than heads, neighbouring ranks hold the same head.
    Heads {
        /// This rank.
        rank: u16,
        /// Of how many.
        size: u16,
    },
    /// Every rank holds everything. The rank only serves to spread work over replicas.
    Replicated {
        /// This rank.
        rank: u16,
        /// Of how many.
        size: u16,
    },
    /// By tokens (context parallelism): reserved, refused when a pool is made.
    Tokens {
        /// This rank.
        rank: u16,
        /// Of how many.
        size: u16,
    },
}

impl Sharding {
    /// One rank that holds everything.
    pub const NONE: Sharding = Sharding::Replicated { rank: 0, size: 1 };

    /// This rank and the number of ranks.
    pub const fn rank(self) -> (u16, u16) {
        match self {
            Sharding::Heads { rank, size } | Sharding::Replicated { rank, size } | Sharding::Tokens { rank, size } => {
                (rank, size)
            }
        }
    }

    /// The heads of a model with `kv_heads` that this rank holds.
    ///
    /// # Errors
    /// `InvalidArgument` if the rank is not below the size or heads and ranks do not divide, `Unsupported` for
    /// sharding by tokens.
    pub fn local_heads(self, kv_heads: u32) -> Result<HeadRange> {
        let (rank, size) = self.rank();
        if rank >= size {
            return Err(
                Error::new(ErrorKind::InvalidArgument, format!("sharding rank {rank} of {size}"))
                    .because("ranks count from 0 to size - 1")
                    .remedy("give a rank below the size"),
            );
        }
        let (rank, size) = (u32::from(rank), u32::from(size));
        match self {
            Sharding::Replicated { .. } => Ok(HeadRange::new(0, kv_heads)),
            Sharding::Heads { .. } if kv_heads.is_multiple_of(size) => {
                let count = kv_heads / size;
                Ok(HeadRange::new(rank * count, (rank + 1) * count))
            }
            Sharding::Heads { .. } if kv_heads > 0 && size.is_multiple_of(kv_heads) => {
                let head = rank / (size / kv_heads);
                Ok(HeadRange::new(head, head + 1))
            }
            Sharding::Heads { .. } => Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("sharding {kv_heads} kv heads over {size} ranks"),
            )
            .because("neither number divides the other")
            .remedy("use a tensor-parallel size that divides the kv heads or is a multiple of them")),
            Sharding::Tokens { .. } => Err(Error::new(ErrorKind::Unsupported, "sharding by tokens")
                .because("context-parallel caches are not built yet")
                .remedy("shard by heads or replicate")),
        }
    }
}

impl fmt::Display for Sharding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sharding::Heads { rank, size } => write!(f, "heads, rank {rank} of {size}"),
            Sharding::Replicated { rank, size } => write!(f, "replicated, rank {rank} of {size}"),
            Sharding::Tokens { rank, size } => write!(f, "tokens, rank {rank} of {size}"),
        }
    }
}

/// What the blocks of one cache group mean. Declared, hashed and compared; never inferred from shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Geometry {
    /// Element type.
    pub dtype: DType,
    /// Tokens in one block; 0 says that this is a state group, whose one block has no positions.
    pub tokens_per_block: u32,
    /// Kv heads of the whole model; 0 for head-less caches (latent planes, undivided states).
    pub kv_heads: u32,
    /// Elements of one head of one token of K; of the whole latent row in head-less caches; 0 in state groups.
    pub head_size: u32,
    /// The same of V, where it differs from K.
    pub value_head_size: u32,
    /// How it is divided among ranks.
    pub sharding: Sharding,
}

impl Geometry {
    /// Keys and values with heads.
    pub const fn attention(
        dtype: DType,
        tokens_per_block: u32,
        kv_heads: u32,
        head_size: u32,
        sharding: Sharding,
    ) -> Self {
        Geometry {
            dtype,
            tokens_per_block,
            kv_heads,
            head_size,
            value_head_size: head_size,
            sharding,
        }
    }

    /// Head-less rows of `row_size` elements per token, as in multi-head latent attention.
    pub const fn latent(dtype: DType, tokens_per_block: u32, row_size: u32, sharding: Sharding) -> Self {
        Geometry {
            dtype,
            tokens_per_block,
            kv_heads: 0,
            head_size: row_size,
            value_head_size: row_size,
            sharding,
        }
    }

    /// Recurrent states: one block per request, no positions. `heads` is 0 if the state cannot be divided.
    pub const fn state(heads: u32, sharding: Sharding) -> Self {
        Geometry {
            dtype: DType::U8,
            tokens_per_block: 0,
            kv_heads: heads,
            head_size: 0,
            value_head_size: 0,
            sharding,
        }
    }

    /// The same with a V head size of its own.
    #[must_use]
    pub const fn with_value_head_size(mut self, value_head_size: u32) -> Self {
        self.value_head_size = value_head_size;
        self
    }

    /// Whether this is a state group: one block, no positions.
    pub const fn is_state(&self) -> bool {
        self.tokens_per_block == 0
    }

    /// Elements per head and token in planes of this kind.
    pub(crate) const fn head_size_of(&self, kind: PlaneKind) -> u32 {
        match kind {
            PlaneKind::Value => self.value_head_size,
            _ => self.head_size,
        }
    }
}

/// An axis inside a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Axis {
    /// K (0) or V (1).
    Kv,
    /// The kv head.
    Head,
    /// The token in the block.
    Token,
    /// The element in the head.
    Dim,
}

impl Axis {
    const fn name(self) -> &'static str {
        match self {
            Axis::Kv => "kv",
            Axis::Head => "head",
            Axis::Token => "token",
            Axis::Dim => "dim",
        }
    }
}

/// The order of the axes inside a block, outermost first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum InnerOrder {
    /// Unknown below the head: per head one run of bytes. Splittable by head only, moved in whole blocks, with equal
    /// tokens per block on both sides.
    Packed,
    /// Token and dim, of head-less planes.
    Latent([Axis; 2]),
    /// Head, token and dim, of K or V planes.
    Single([Axis; 3]),
    /// Kv, head, token and dim, of fused planes.
    Fused([Axis; 4]),
}

impl InnerOrder {
    /// Token, head, dim.
    pub const NHD: InnerOrder = InnerOrder::Single([Axis::Token, Axis::Head, Axis::Dim]);
    /// Head, token, dim.
    pub const HND: InnerOrder = InnerOrder::Single([Axis::Head, Axis::Token, Axis::Dim]);
    /// Token, dim: latent rows one after another.
    pub const ROWS: InnerOrder = InnerOrder::Latent([Axis::Token, Axis::Dim]);
    /// All K of the block in NHD order, then all V.
    pub const KV_NHD: InnerOrder = InnerOrder::Fused([Axis::Kv, Axis::Token, Axis::Head, Axis::Dim]);
    /// All K of the block in HND order, then all V.
    pub const KV_HND: InnerOrder = InnerOrder::Fused([Axis::Kv, Axis::Head, Axis::Token, Axis::Dim]);

    /// The axes, outermost first; empty for packed.
    pub fn axes(&self) -> &[Axis] {
        match self {
            InnerOrder::Packed => &[],
            InnerOrder::Latent(axes) => axes,
            InnerOrder::Single(axes) => axes,
            InnerOrder::Fused(axes) => axes,
        }
    }
}

impl fmt::Display for InnerOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if matches!(self, InnerOrder::Packed) {
            return f.write_str("packed");
        }
        for (index, axis) in self.axes().iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            f.write_str(axis.name())?;
        }
        Ok(())
    }
}

/// What a plane's blocks hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PlaneKind {
    /// Keys.
    Key,
    /// Values.
    Value,
    /// Keys and values in one block.
    Fused,
    /// Head-less rows.
    Latent,
    /// A recurrent state.
    State,
}

impl PlaneKind {
    /// The kind's name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            PlaneKind::Key => "K",
            PlaneKind::Value => "V",
            PlaneKind::Fused => "fused",
            PlaneKind::Latent => "latent",
            PlaneKind::State => "state",
        }
    }

    pub(crate) const fn is_attention(self) -> bool {
        matches!(self, PlaneKind::Key | PlaneKind::Value | PlaneKind::Fused)
    }

    /// Values of the kv axis that a block of this kind holds.
    pub(crate) const fn kv_count(self) -> u32 {
        match self {
            PlaneKind::Fused => 2,
            _ => 1,
        }
    }
}

impl fmt::Display for PlaneKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An array of blocks at a constant stride inside a region.
///
/// A block-major (cross-layer) cache is one plane per layer and kind whose stride is the whole big block and whose
/// base is its place in it. Heads outside the blocks are one plane per head range.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plane {
    /// The layer, as an index in [`PoolLayout::layers`](super::PoolLayout::layers).
    pub layer: u16,
    /// The cache group.
    pub group: u16,
    /// What the blocks hold.
    pub kind: PlaneKind,
    /// Index of the region in the pool.
    pub region: u32,
    /// Offset of block 0 in the region, in bytes.
    pub base: u64,
    /// Bytes from one block to the next.
    pub stride: u64,
    /// Bytes of one block.
    pub block_length: u64,
    /// Number of blocks.
    pub blocks: u32,
    /// The heads it holds, `None` if it has none.
    pub heads: Option<HeadRange>,
    /// How a block is laid out inside.
    pub order: InnerOrder,
}

impl Plane {
    /// One past the last byte of the plane in its region; `None` if that overflows.
    pub(crate) fn end(&self) -> Option<u64> {
        let last = u64::from(self.blocks.checked_sub(1)?);
        self.base
            .checked_add(last.checked_mul(self.stride)?)?
            .checked_add(self.block_length)
    }

    /// Bytes a block must have; `None` for states (free) and on overflow.
    pub(crate) fn product(&self, geometry: &Geometry) -> Option<u64> {
        let heads = u64::from(self.heads.map_or(1, HeadRange::count));
        let sizes = match self.kind {
            PlaneKind::State => return None,
            PlaneKind::Fused => u64::from(geometry.head_size) + u64::from(geometry.value_head_size),
            kind => u64::from(geometry.head_size_of(kind)),
        };
        geometry
            .dtype
            .bytes()
            .checked_mul(u64::from(geometry.tokens_per_block))?
            .checked_mul(heads)?
            .checked_mul(sizes)
    }
}

/// Planes that share a block table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheGroup {
    /// A label for messages.
    pub name: String,
    /// What its blocks mean.
    pub geometry: Geometry,
    /// Blocks in each of its planes.
    pub blocks: u32,
    /// Tokens that its attention looks back, if it is a sliding window.
    pub window: Option<u32>,
}

//! What memory means: geometry, planes, pools, selections. Parsed once, valid ever after.
// SKELETON (owner: layout+plan). Types and signatures are the contract; bodies and private fields are the owner's.

use serde::{Deserialize, Serialize};

use crate::error::Result;

/// Index of a block; the same slot in every plane of its cache group.
pub type BlockId = u32;

/// A pool's planes and what they mean together, validated. Its wire form is what peers exchange in Hello.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolLayout {
    // owner's
}

impl PoolLayout {
    /// A hash of everything declared in the geometry (not of addresses), equal on equal declarations.
    pub fn geometry_hash(&self) -> u64 {
        unimplemented!()
    }
    /// The layer ids in plane order, deduplicated: a layer index in a [`Scope`](crate::plan::Scope) or
    /// [`PartExtent`](crate::flow::PartExtent) counts in this list.
    pub fn layers(&self) -> &[String] {
        unimplemented!()
    }
    /// Number of cache groups.
    pub fn groups(&self) -> usize {
        unimplemented!()
    }
    /// Checks that each group's blocks exist, are distinct, and hold exactly the selected tokens.
    pub fn check(&self, _selection: &Selection) -> Result<()> {
        unimplemented!()
    }
}

/// What of a request is meant, per cache group.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Selection {
    /// One entry per cache group of the pool, in order.
    pub groups: Vec<GroupSelection>,
}

/// The tokens `first_token..token_end` of the request, and the blocks that hold them, in token order. The first
/// block holds token `first_token - first_token % tokens_per_block` in its first slot. A state group has one block
/// and `first_token == token_end == 0`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GroupSelection {
    /// First token position meant.
    pub first_token: u32,
    /// One past the last token position meant.
    pub token_end: u32,
    /// The blocks.
    pub blocks: Vec<BlockId>,
}

/// The explicit form: bytes of one block of one plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockDescriptor {
    /// Index of the plane in the pool.
    pub plane: u32,
    /// The block.
    pub block: BlockId,
    /// First byte inside the block.
    pub offset: u32,
    /// Bytes.
    pub length: u32,
}

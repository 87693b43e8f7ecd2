//! The planner: from a source selection and a destination selection to a copy program. Pure.
//!
//! # Stream order
//! The byte stream of a part is *the destination's bytes in the destination's own order*: layer (destination layer
//! list order), plane, block in token order, then ascending address inside the block, restricted to the part's
//! tokens and layers and the grant's scope (layers and heads). It depends on nothing of the source, so that the
//! receiver can place bytes knowing only its own grant and the part's extent.
// SKELETON (owner: layout+plan).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::flow::{ByteStream, PartExtent};
use crate::layout::{BlockDescriptor, PoolLayout, Selection};

/// Which layers and heads of the destination one source provides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scope {
    /// Indices in the destination pool's layer list, ascending. Layer numbers in a part's extent index THIS list.
    pub layers: Vec<u16>,
    /// Global kv-head range, or `None` for head-less planes and whole planes.
    pub heads: Option<(u32, u32)>,
}

/// Which of the sources sends what to this destination: one entry per source, `None` if it has nothing to send
/// (another replica does). Errors with `GeometryMismatch` naming the field, or naming layers or heads nobody covers.
pub fn assign(_sources: &[&PoolLayout], _destination: &PoolLayout) -> Result<Vec<Option<Scope>>> {
    unimplemented!()
}

/// What a grant covers, on the receiver's side: blocks by selection (and scope), or explicit descriptors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    /// Whole blocks and token ranges.
    Selection {
        /// What of the request.
        selection: Selection,
        /// Which layers and heads.
        scope: Scope,
    },
    /// Explicit pieces; the stream is their bytes in list order, and only [`PartExtent::WHOLE`] is allowed.
    Descriptors(Vec<BlockDescriptor>),
}

impl Target {
    /// Total bytes.
    pub fn bytes(&self, _layout: &PoolLayout) -> Result<u64> {
        unimplemented!()
    }

    /// The destination-side stream of one part.
    pub fn stream(self: &Arc<Self>, _layout: &Arc<PoolLayout>, _extent: PartExtent) -> Result<Arc<dyn ByteStream>> {
        unimplemented!()
    }
}

/// The source-side stream of one part: the same bytes in the same order, found in the source's blocks.
/// Errors if a destination token of the part is not covered by the source, naming the range.
pub fn source_stream(
    _source: &Arc<PoolLayout>,
    _source_target: &Arc<Target>,
    _destination: &Arc<PoolLayout>,
    _target: &Arc<Target>,
    _extent: PartExtent,
) -> Result<Arc<dyn ByteStream>> {
    unimplemented!()
}

//! The planner: from a source selection and a destination selection to a copy program. Pure.
//!
//! # Stream order
//! The byte stream of a part is *the destination's bytes in the destination's own order*: layer (destination layer
//! list order), plane, block in token order, then ascending address inside the block, restricted to the part's
//! tokens and layers and the grant's scope (layers and heads). It depends on nothing of the source, so that the
//! receiver can place bytes knowing only its own grant and the part's extent.
//!
//! Blocks of packed planes move whole, with the part that has their last selected token. State blocks go with the
//! parts whose extent says `states`.
//!
//! # Cost
//! Making a stream looks at each plane and each block of the part once and stores a few words per plane. Expanding a
//! range of it seeks in O(log planes) and then does a few instructions per segment, without allocation once `out` has
//! its capacity.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::flow::{ByteStream, PartExtent};
use crate::layout::{BlockDescriptor, HeadRange, PoolLayout, Selection};

mod assign;
mod descriptors;
mod nest;
mod pair;
mod runs;
mod shape;
mod stream;

pub use assign::assign;
pub use runs::{Plan, Run, RunLimits, Runs};

use descriptors::DescriptorStream;
use stream::{SelectionStream, Wanted};

/// Which layers and heads of the destination one source provides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scope {
    /// Indices in the destination pool's layer list, ascending. Layer numbers in a part's extent index THIS list.
    /// An empty list stands for all layers of the pool, in order.
    pub layers: Vec<u16>,
    /// Global kv-head ranges, one per cache group of the destination pool (of groups without heads any), or `None`
    /// for all heads.
    pub heads: Option<Vec<HeadRange>>,
}

impl Scope {
    /// Everything that a pool has.
    pub const EVERYTHING: Scope = Scope {
        layers: Vec::new(),
        heads: None,
    };

    /// Number of layers in it.
    pub fn layer_count(&self, layout: &PoolLayout) -> usize {
        if self.layers.is_empty() {
            layout.layers().len()
        } else {
            self.layers.len()
        }
    }

    /// The layer at this position, as an index in the pool's layer list.
    pub fn layer(&self, position: usize) -> u16 {
        self.layers.get(position).copied().unwrap_or(position as u16)
    }

    /// The position of a layer of the pool in this scope: what a part's extent counts in.
    pub fn position(&self, layer: u16) -> Option<u16> {
        if self.layers.is_empty() {
            return Some(layer);
        }
        self.layers.binary_search(&layer).ok().map(|position| position as u16)
    }

    /// Checks that the layers exist and ascend, and that there is a head range for each group.
    ///
    /// # Errors
    /// `OutOfBounds` for a layer that does not exist, `InvalidArgument` otherwise.
    pub fn check(&self, layout: &PoolLayout) -> Result<()> {
        if let Some(&layer) = self
            .layers
            .iter()
            .find(|&&layer| usize::from(layer) >= layout.layers().len())
        {
            return Err(Error::new(ErrorKind::OutOfBounds, format!("layer {layer} of a scope"))
                .because(format!("the pool has {} layers", layout.layers().len())));
        }
        if let Some(pair) = self.layers.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("layers {} and {} of a scope", pair[0], pair[1]),
            )
            .because("a scope lists layers in ascending order, each once"));
        }
        self.check_heads(layout)
    }

    fn check_heads(&self, layout: &PoolLayout) -> Result<()> {
        match &self.heads {
            Some(heads) if heads.len() != layout.groups() => Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("a scope with {} head ranges", heads.len()),
            )
            .because(format!("the pool has {} cache groups", layout.groups()))
            .remedy("give one range per cache group, or none for all heads")),
            _ => Ok(()),
        }
    }

    fn heads_of(&self, group: usize) -> Option<HeadRange> {
        self.heads.as_ref().map(|heads| heads[group])
    }

    fn contains_layer(&self, layer: u16) -> bool {
        self.layers.is_empty() || self.layers.binary_search(&layer).is_ok()
    }
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

impl From<Selection> for Target {
    /// All layers and heads of the selection.
    fn from(selection: Selection) -> Target {
        Target::Selection {
            selection,
            scope: Scope::EVERYTHING,
        }
    }
}

impl From<Vec<BlockDescriptor>> for Target {
    fn from(descriptors: Vec<BlockDescriptor>) -> Target {
        Target::Descriptors(descriptors)
    }
}

impl Target {
    /// Checks everything: blocks, tokens, layers, heads; that descriptors lie in their blocks and apart.
    ///
    /// # Errors
    /// `InvalidArgument` or `OutOfBounds`, naming the block, descriptor or layer.
    pub fn check(&self, layout: &PoolLayout) -> Result<()> {
        match self {
            Target::Selection { selection, scope } => {
                layout.check(selection)?;
                scope.check(layout)
            }
            Target::Descriptors(descriptors) => descriptors::check(layout, descriptors),
        }
    }

    /// Total bytes of a target that holds in this pool.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn bytes(&self, layout: &PoolLayout) -> Result<u64> {
        self.check(layout)?;
        match self {
            Target::Selection { selection, scope } => stream::part_bytes(Wanted {
                layout,
                selection,
                scope,
                extent: PartExtent::WHOLE,
            }),
            Target::Descriptors(descriptors) => Ok(descriptors::bytes(descriptors)),
        }
    }

    /// The bytes of one part, without making its stream.
    ///
    /// # Errors
    /// As [`stream`](Self::stream).
    pub fn part_bytes(&self, layout: &PoolLayout, extent: PartExtent) -> Result<u64> {
        match self {
            Target::Selection { selection, scope } => stream::part_bytes(Wanted {
                layout,
                selection,
                scope,
                extent,
            }),
            Target::Descriptors(descriptors) => {
                whole_only(extent)?;
                Ok(descriptors::bytes(descriptors))
            }
        }
    }

    /// The destination-side stream of one part. Checks what keeps its segments inside the pool's regions; that blocks
    /// are distinct is checked once, by [`check`](Self::check).
    ///
    /// # Errors
    /// `InvalidArgument` and `OutOfBounds` for a target that does not fit the pool, and for parts of descriptors.
    pub fn stream(self: &Arc<Self>, layout: &Arc<PoolLayout>, extent: PartExtent) -> Result<Arc<dyn ByteStream>> {
        Ok(match &**self {
            Target::Selection { selection, scope } => Arc::new(SelectionStream::of_destination(
                Wanted {
                    layout,
                    selection,
                    scope,
                    extent,
                },
                self,
            )?),
            Target::Descriptors(descriptors) => {
                whole_only(extent)?;
                Arc::new(DescriptorStream::new(layout, descriptors)?)
            }
        })
    }
}

/// The source-side stream of one part: the same bytes in the same order, found in the source's blocks.
///
/// Where either side is given by descriptors there is nothing to match by: the source's own bytes in the source's own
/// order fill the destination's, and only the lengths must agree.
///
/// # Errors
/// `InvalidArgument` if a destination token of the part is not covered by the source, naming the range, or if lengths
/// differ; `GeometryMismatch` naming the field; `OutOfBounds` for source blocks that do not exist.
pub fn source_stream(
    source: &Arc<PoolLayout>,
    source_target: &Arc<Target>,
    destination: &Arc<PoolLayout>,
    target: &Arc<Target>,
    extent: PartExtent,
) -> Result<Arc<dyn ByteStream>> {
    if let (
        Target::Selection {
            selection: have,
            scope: source_scope,
        },
        Target::Selection { selection, scope },
    ) = (&**source_target, &**target)
    {
        let wanted = Wanted {
            layout: destination,
            selection,
            scope,
            extent,
        };
        return Ok(Arc::new(SelectionStream::of_source(
            wanted,
            source,
            have,
            source_scope,
            source_target,
        )?));
    }
    whole_only(extent)?;
    let stream = source_target.stream(source, extent)?;
    let needed = target.part_bytes(destination, extent)?;
    if stream.length() != needed {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("a source of {} bytes", stream.length()),
        )
        .because(format!("the destination has {needed}"))
        .remedy("give descriptors of the same length in all on both sides"));
    }
    Ok(stream)
}

fn whole_only(extent: PartExtent) -> Result<()> {
    if extent == PartExtent::WHOLE {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidArgument, "a part of explicit descriptors")
        .because("descriptors have no tokens and layers to take a part of")
        .remedy("transfer descriptors whole, or give a selection"))
}

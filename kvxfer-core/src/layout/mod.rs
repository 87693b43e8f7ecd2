//! What memory means: geometry, planes, pools, selections. Parsed once, valid ever after.
//!
//! A [`PoolLayout`] is declared with [`PoolLayout::builder`], by a [`Model`] preset, or as [`PoolLayout::opaque`]
//! blocks of bytes. It is validated when it is made and again when it is read from the wire; the planner relies on
//! that and checks nothing twice.

use serde::{Deserialize, Serialize, Serializer};

use crate::error::{Error, ErrorKind, Result};

mod builder;
mod geometry;
mod model;
mod overlap;
mod selection;
mod validate;

pub use builder::{LayoutBuilder, PlaneSpec};
pub use geometry::{Axis, CacheGroup, DType, Geometry, HeadRange, InnerOrder, Plane, PlaneKind, Sharding};
pub use model::{Arrangement, HeadOrder, LayerRange, Model, ModelGroup, ModelKind, PlaneArrangement};
pub use selection::{BlockDescriptor, GroupSelection, Selection};
pub use validate::{GROUPS_MAX, KV_HEADS_MAX, NAME_BYTES_MAX, PLANES_MAX, REGION_BYTES_MAX};

pub(crate) use selection::{check_range, place as group_place};
pub(crate) use validate::PlaneClass;

use validate::Derived;

/// Index of a block; the same slot in every plane of its cache group.
pub type BlockId = u32;

/// A pool's planes and what they mean together, validated. Its wire form is what peers exchange in Hello.
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "PoolSpec")]
pub struct PoolLayout {
    spec: PoolSpec,
    derived: Derived,
}

/// A pool as declared: the wire form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct PoolSpec {
    groups: Vec<CacheGroup>,
    layers: Vec<String>,
    planes: Vec<Plane>,
    /// Bytes that each region must have.
    regions: Vec<u64>,
    shared_blocks: bool,
}

impl PoolLayout {
    /// A layout to be declared group by group and plane by plane.
    pub fn builder() -> LayoutBuilder {
        LayoutBuilder::default()
    }

    /// Blocks of raw bytes in one region: one latent plane of one token per block, layer `"0"`. What a selection
    /// calls tokens are blocks then.
    ///
    /// # Errors
    /// `InvalidArgument` for zero bytes or blocks, or more than [`REGION_BYTES_MAX`] in all.
    pub fn opaque(block_bytes: u32, blocks: u32) -> Result<PoolLayout> {
        let mut builder = PoolLayout::builder();
        let geometry = Geometry::latent(DType::U8, 1, block_bytes, Sharding::NONE);
        let group = builder.group("opaque", geometry, blocks);
        builder.plane(PlaneSpec::new(group, "0", PlaneKind::Latent));
        builder.build()
    }

    /// A hash of everything declared in the geometry (not of addresses), equal on equal declarations.
    pub fn geometry_hash(&self) -> u64 {
        self.derived.geometry_hash
    }

    /// The layer ids in plane order, deduplicated: a layer index in a [`Scope`](crate::plan::Scope) or
    /// [`PartExtent`](crate::flow::PartExtent) counts in this list.
    pub fn layers(&self) -> &[String] {
        &self.spec.layers
    }

    /// The index of the layer with this id, in O(log n).
    pub fn layer_index(&self, id: &str) -> Option<u16> {
        let by_id = &self.derived.layers_by_id;
        by_id
            .binary_search_by(|&layer| self.spec.layers[layer as usize].as_str().cmp(id))
            .ok()
            .map(|position| by_id[position])
    }

    /// Number of cache groups.
    pub fn groups(&self) -> usize {
        self.spec.groups.len()
    }

    /// The cache groups, in the order of a selection's entries.
    pub fn cache_groups(&self) -> &[CacheGroup] {
        &self.spec.groups
    }

    /// The planes.
    pub fn planes(&self) -> &[Plane] {
        &self.spec.planes
    }

    /// Whether planes of different groups may overlap, a block id belonging to one group at a time.
    pub fn shared_blocks(&self) -> bool {
        self.spec.shared_blocks
    }

    /// Bytes that each region must have: what to allocate, or to check given memory against.
    pub fn region_lengths(&self) -> &[u64] {
        &self.spec.regions
    }

    /// The kv heads of this group on this rank; `None` if the group has no heads.
    pub fn local_heads(&self, group: usize) -> Option<HeadRange> {
        let heads = *self.derived.local_heads.get(group)?;
        (heads.count() > 0).then_some(heads)
    }

    /// Where a block of a plane begins: region and offset.
    ///
    /// # Errors
    /// `OutOfBounds` if the plane or the block does not exist.
    pub fn plane_offset(&self, plane: usize, block: BlockId) -> Result<(u32, u64)> {
        let found = self.spec.planes.get(plane).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, format!("plane {plane}"))
                .because(format!("the pool has {} planes", self.spec.planes.len()))
        })?;
        if block >= found.blocks {
            return Err(Error::new(ErrorKind::OutOfBounds, format!("block {block}"))
                .at(layout_place(&self.spec, plane))
                .because(format!("the plane has {} blocks", found.blocks))
                .remedy(format!("use block ids below {}", found.blocks)));
        }
        Ok((found.region, found.base + u64::from(block) * found.stride))
    }

    /// The planes of a layer, as indices in plane order.
    pub(crate) fn layer_planes(&self, layer: u16) -> &[u32] {
        let starts = &self.derived.layer_starts;
        let layer = usize::from(layer);
        &self.derived.layer_planes[starts[layer] as usize..starts[layer + 1] as usize]
    }

    pub(crate) fn plane_class(&self, plane: u32) -> u16 {
        self.derived.plane_classes[plane as usize]
    }

    /// Layers of one class have the same plane classes in the same order.
    pub(crate) fn layer_class(&self, layer: u16) -> u16 {
        self.derived.layer_classes[usize::from(layer)]
    }

    pub(crate) fn class(&self, class: u16) -> &PlaneClass {
        &self.derived.classes[usize::from(class)]
    }

    pub(crate) fn group_is_packed(&self, group: usize) -> bool {
        self.derived.group_packed[group]
    }

    pub(crate) fn widest_group(&self) -> u32 {
        self.derived.widest_group
    }

    /// A plane in messages.
    pub(crate) fn plane_place(&self, plane: usize) -> String {
        layout_place(&self.spec, plane)
    }
}

impl PartialEq for PoolLayout {
    fn eq(&self, other: &Self) -> bool {
        self.spec == other.spec
    }
}

impl Eq for PoolLayout {}

impl Serialize for PoolLayout {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.spec.serialize(serializer)
    }
}

impl TryFrom<PoolSpec> for PoolLayout {
    type Error = Error;

    fn try_from(spec: PoolSpec) -> Result<PoolLayout> {
        let derived = validate::validate(&spec)?;
        Ok(PoolLayout { spec, derived })
    }
}

fn layout_place(spec: &PoolSpec, index: usize) -> String {
    let plane = &spec.planes[index];
    let layer = spec
        .layers
        .get(usize::from(plane.layer))
        .map_or("?", |layer| layer.as_str());
    format!("plane {index} ({} of layer {layer})", plane.kind)
}

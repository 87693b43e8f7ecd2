//! Declaring a layout step by step.

use std::collections::HashMap;
use std::ops::Range;

use super::{CacheGroup, Geometry, HeadRange, InnerOrder, Plane, PlaneKind, PoolLayout, PoolSpec};
use crate::error::{Error, ErrorKind, Result};

/// Collects groups and planes; [`build`](Self::build) validates them together.
///
/// ```
/// use kvxfer_core::layout::{DType, Geometry, PlaneKind, PlaneSpec, PoolLayout, Sharding};
///
/// let mut builder = PoolLayout::builder();
/// let geometry = Geometry::attention(DType::Bf16, 16, 8, 128, Sharding::Heads { rank: 0, size: 4 });
/// let group = builder.group("attention", geometry, 768);
/// for layer in 0..32 {
///     builder.plane(PlaneSpec::new(group, layer.to_string(), PlaneKind::Key));
///     builder.plane(PlaneSpec::new(group, layer.to_string(), PlaneKind::Value));
/// }
/// let layout = builder.build()?;
/// assert_eq!(layout.region_lengths(), [64 * 768 * 8192]);
/// # Ok::<(), kvxfer_core::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct LayoutBuilder {
    groups: Vec<CacheGroup>,
    planes: Vec<PlaneSpec>,
    regions: HashMap<u32, u64>,
    shared_blocks: bool,
}

/// A plane to be added. What is not said follows from the group: it begins where the last plane of its region ended,
/// its blocks lie one after another, it holds all of the rank's heads, in NHD order.
#[derive(Debug, Clone)]
pub struct PlaneSpec {
    group: u16,
    layer: String,
    kind: PlaneKind,
    region: u32,
    base: Option<u64>,
    stride: Option<u64>,
    block_length: Option<u64>,
    heads: Option<HeadRange>,
    order: Option<InnerOrder>,
}

impl PlaneSpec {
    /// A plane of this group, layer and kind.
    pub fn new(group: u16, layer: impl Into<String>, kind: PlaneKind) -> Self {
        PlaneSpec {
            group,
            layer: layer.into(),
            kind,
            region: 0,
            base: None,
            stride: None,
            block_length: None,
            heads: None,
            order: None,
        }
    }

    /// The region it lies in (0 if not said).
    #[must_use]
    pub fn region(mut self, region: u32) -> Self {
        self.region = region;
        self
    }

    /// Offset of block 0 in the region, in bytes.
    #[must_use]
    pub fn base(mut self, base: u64) -> Self {
        self.base = Some(base);
        self
    }

    /// Bytes from one block to the next.
    #[must_use]
    pub fn stride(mut self, stride: u64) -> Self {
        self.stride = Some(stride);
        self
    }

    /// Bytes of one block. Needed for states only; for others it is checked against the geometry.
    #[must_use]
    pub fn block_length(mut self, block_length: u64) -> Self {
        self.block_length = Some(block_length);
        self
    }

    /// The heads it holds, counted over the whole model.
    #[must_use]
    pub fn heads(mut self, heads: Range<u32>) -> Self {
        self.heads = Some(HeadRange::new(heads.start, heads.end));
        self
    }

    /// The order inside its blocks.
    #[must_use]
    pub fn order(mut self, order: InnerOrder) -> Self {
        self.order = Some(order);
        self
    }
}

impl LayoutBuilder {
    /// Adds a cache group; its number is what planes name.
    pub fn group(&mut self, name: impl Into<String>, geometry: Geometry, blocks: u32) -> u16 {
        self.groups.push(CacheGroup {
            name: name.into(),
            geometry,
            blocks,
            window: None,
        });
        // Too many groups are refused by `build`.
        u16::try_from(self.groups.len() - 1).unwrap_or(u16::MAX)
    }

    /// Says that a group's attention looks back only this many tokens.
    pub fn window(&mut self, group: u16, tokens: u32) -> &mut Self {
        if let Some(group) = self.groups.get_mut(usize::from(group)) {
            group.window = Some(tokens);
        }
        self
    }

    /// Adds a plane.
    pub fn plane(&mut self, plane: PlaneSpec) -> &mut Self {
        self.planes.push(plane);
        self
    }

    /// Declares a region's length in bytes. Regions not declared are as long as their planes need.
    pub fn region(&mut self, region: u32, length: u64) -> &mut Self {
        self.regions.insert(region, length);
        self
    }

    /// Says that planes of different groups may overlap, a block id belonging to one group at a time.
    pub fn shared_blocks(&mut self) -> &mut Self {
        self.shared_blocks = true;
        self
    }

    /// Validates.
    ///
    /// # Errors
    /// `InvalidArgument` and `OutOfBounds` naming the group or plane and the field; `Unsupported` for sharding by
    /// tokens.
    pub fn build(&self) -> Result<PoolLayout> {
        let mut spec = PoolSpec {
            groups: self.groups.clone(),
            layers: Vec::new(),
            planes: Vec::with_capacity(self.planes.len()),
            regions: Vec::new(),
            shared_blocks: self.shared_blocks,
        };
        let mut layer_numbers: HashMap<&str, u16> = HashMap::new();
        let mut region_ends: HashMap<u32, u64> = HashMap::new();
        for (index, plane) in self.planes.iter().enumerate() {
            let layer = match layer_numbers.get(plane.layer.as_str()) {
                Some(&layer) => layer,
                None => {
                    let layer = u16::try_from(spec.layers.len()).map_err(|_| {
                        Error::new(ErrorKind::InvalidArgument, "a pool layout with more than 65,536 layers")
                    })?;
                    layer_numbers.insert(&plane.layer, layer);
                    spec.layers.push(plane.layer.clone());
                    layer
                }
            };
            let end = region_ends.entry(plane.region).or_insert(0);
            let complete = self.complete(index, plane, layer, *end)?;
            *end = (*end).max(complete.end().unwrap_or(u64::MAX));
            spec.planes.push(complete);
        }
        spec.regions = self.region_lengths(&region_ends)?;
        PoolLayout::try_from(spec)
    }

    fn complete(&self, index: usize, plane: &PlaneSpec, layer: u16, region_end: u64) -> Result<Plane> {
        let place = || format!("plane {index} ({} of layer {})", plane.kind, plane.layer);
        let group = self.groups.get(usize::from(plane.group)).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, format!("cache group {}", plane.group))
                .at(place())
                .because(format!("the layout has {} groups so far", self.groups.len()))
                .remedy("use the number that `group` returned")
        })?;
        let geometry = &group.geometry;
        let heads = match plane.heads {
            Some(heads) => Some(heads),
            None if geometry.kv_heads == 0 => None,
            None => Some(geometry.sharding.local_heads(geometry.kv_heads)?),
        };
        let mut complete = Plane {
            layer,
            group: plane.group,
            kind: plane.kind,
            region: plane.region,
            base: plane.base.unwrap_or(region_end),
            stride: 0,
            block_length: 0,
            blocks: group.blocks,
            heads,
            order: plane.order.unwrap_or(match plane.kind {
                PlaneKind::Key | PlaneKind::Value => InnerOrder::NHD,
                PlaneKind::Fused => InnerOrder::KV_NHD,
                PlaneKind::Latent => InnerOrder::ROWS,
                PlaneKind::State => InnerOrder::Packed,
            }),
        };
        complete.block_length = plane
            .block_length
            .or_else(|| complete.product(geometry))
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::InvalidArgument,
                    format!("a {} plane without block length", plane.kind),
                )
                .at(place())
                .because("it does not follow from the geometry")
                .remedy("give PlaneSpec::block_length")
            })?;
        complete.stride = plane.stride.unwrap_or(complete.block_length);
        Ok(complete)
    }

    fn region_lengths(&self, ends: &HashMap<u32, u64>) -> Result<Vec<u64>> {
        let count = ends
            .keys()
            .chain(self.regions.keys())
            .max()
            .map_or(0, |&last| last as usize + 1);
        if count > super::PLANES_MAX {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("region {}", count - 1))
                .because(format!("at most {} regions are supported", super::PLANES_MAX))
                .remedy("number the regions from 0"));
        }
        Ok((0..count as u32)
            .map(|region| {
                let needed = ends.get(&region).copied().unwrap_or(0);
                self.regions.get(&region).copied().unwrap_or(needed)
            })
            .collect())
    }
}

//! Validation of a declared pool, and what is derived from it once.

use std::collections::HashMap;

use super::geometry::{CacheGroup, HeadRange, InnerOrder, Plane, PlaneKind};
use super::overlap::find_overlap;
use super::{PoolSpec, layout_place};
use crate::error::{Error, ErrorKind, Result};

/// Planes of a pool, at most: 512 layers of K and V in 16 head ranges each.
pub const PLANES_MAX: usize = 16_384;
/// Cache groups of a pool, at most.
pub const GROUPS_MAX: usize = 64;
/// Bytes of a region, at most (256 TiB), so that no sum over planes overflows.
pub const REGION_BYTES_MAX: u64 = 1 << 48;
/// Kv heads of a model, at most.
pub const KV_HEADS_MAX: u32 = 4_096;
/// Bytes of a layer id or group name, at most.
pub const NAME_BYTES_MAX: usize = 128;

/// What the planner needs at hand, computed once.
#[derive(Debug, Clone)]
pub(super) struct Derived {
    pub(super) geometry_hash: u64,
    /// Planes of layer `l`, in plane order: `layer_planes[layer_starts[l]..layer_starts[l + 1]]`.
    pub(super) layer_starts: Vec<u32>,
    pub(super) layer_planes: Vec<u32>,
    /// Planes that differ in nothing but layer, region, base and stride have one class.
    pub(super) plane_classes: Vec<u16>,
    pub(super) classes: Vec<PlaneClass>,
    /// Layers whose planes have the same classes in the same order have one class.
    pub(super) layer_classes: Vec<u16>,
    /// Layer indices sorted by id.
    pub(super) layers_by_id: Vec<u16>,
    pub(super) group_packed: Vec<bool>,
    pub(super) local_heads: Vec<HeadRange>,
    pub(super) widest_group: u32,
}

/// What planes have in common that look alike inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PlaneClass {
    pub(crate) group: u16,
    pub(crate) kind: PlaneKind,
    pub(crate) heads: Option<HeadRange>,
    pub(crate) order: InnerOrder,
    pub(crate) block_length: u64,
}

pub(super) fn validate(spec: &PoolSpec) -> Result<Derived> {
    check_counts(spec)?;
    let local_heads = spec
        .groups
        .iter()
        .enumerate()
        .map(|(index, group)| check_group(index, group))
        .collect::<Result<Vec<_>>>()?;
    check_layers(spec)?;
    for (index, plane) in spec.planes.iter().enumerate() {
        check_plane(spec, index, plane, &local_heads)?;
    }
    // After the planes, whose own complaints say more about a region that follows from them.
    check_regions(spec)?;
    let (layer_starts, layer_planes) = planes_by_layer(spec);
    for layer in 0..spec.layers.len() {
        let planes = &layer_planes[layer_starts[layer] as usize..layer_starts[layer + 1] as usize];
        check_layer_planes(spec, layer, planes, &local_heads)?;
    }
    check_overlaps(spec)?;
    let (plane_classes, classes) = classify(spec)?;
    Ok(Derived {
        layer_classes: classify_layers(&layer_starts, &layer_planes, &plane_classes),
        geometry_hash: geometry_hash(spec),
        layers_by_id: sorted_layers(&spec.layers)?,
        group_packed: (0..spec.groups.len())
            .map(|group| {
                classes.iter().any(|class| {
                    class.group as usize == group && class.order == InnerOrder::Packed && class.kind != PlaneKind::State
                })
            })
            .collect(),
        widest_group: spec.groups.iter().map(|group| group.blocks).max().unwrap_or(0),
        layer_starts,
        layer_planes,
        plane_classes,
        classes,
        local_heads,
    })
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, what)
}

fn check_counts(spec: &PoolSpec) -> Result<()> {
    let limits = [
        ("planes", spec.planes.len(), PLANES_MAX),
        ("cache groups", spec.groups.len(), GROUPS_MAX),
        ("layers", spec.layers.len(), PLANES_MAX),
        ("regions", spec.regions.len(), PLANES_MAX),
    ];
    for (name, count, max) in limits {
        if count == 0 {
            return Err(invalid(format!("a pool layout without {name}")).remedy(format!("declare {name}")));
        }
        if count > max {
            return Err(invalid(format!("a pool layout with {count} {name}"))
                .because(format!("at most {max} are supported"))
                .remedy("split the pool"));
        }
    }
    Ok(())
}

fn check_regions(spec: &PoolSpec) -> Result<()> {
    for (index, &length) in spec.regions.iter().enumerate() {
        if length == 0 || length > REGION_BYTES_MAX {
            return Err(invalid(format!("region {index} of {length} bytes"))
                .because(format!("regions have 1 to {REGION_BYTES_MAX} bytes"))
                .remedy("declare only regions that planes lie in, with their real lengths"));
        }
    }
    Ok(())
}

/// Checks a group by itself; its heads on this rank.
fn check_group(index: usize, group: &CacheGroup) -> Result<HeadRange> {
    let place = || format!("cache group {index} ({})", group.name);
    let refuse = |what: String, remedy: &str| Err(invalid(what).at(place()).remedy(remedy));
    check_name("cache group name", &group.name)?;
    let geometry = &group.geometry;
    if group.blocks == 0 {
        return refuse(
            "a cache group of 0 blocks".into(),
            "give the number of blocks of its planes",
        );
    }
    if geometry.is_state() {
        if geometry.head_size != 0 || geometry.value_head_size != 0 {
            return refuse(
                "0 tokens per block together with a head size".into(),
                "set tokens per block, or build the geometry with Geometry::state",
            );
        }
    } else if geometry.head_size == 0 || geometry.value_head_size == 0 {
        return refuse("a head size of 0".into(), "give the elements of one head of one token");
    }
    if geometry.kv_heads > KV_HEADS_MAX {
        return refuse(
            format!("{} kv heads", geometry.kv_heads),
            &format!("at most {KV_HEADS_MAX} are supported"),
        );
    }
    if group.window == Some(0) {
        return refuse(
            "a sliding window of 0 tokens".into(),
            "give the window's tokens, or none",
        );
    }
    if geometry.kv_heads == 0 && matches!(geometry.sharding, super::Sharding::Heads { .. }) {
        return refuse(
            "a head-less cache sharded by heads".into(),
            "declare it replicated; a state that differs by rank has one head per rank",
        );
    }
    geometry
        .sharding
        .local_heads(geometry.kv_heads)
        .map_err(|e| e.at(place()))
}

fn check_name(what: &str, name: &str) -> Result<()> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return Err(invalid(format!("a {what} of {} bytes", name.len()))
            .because(format!("names have 1 to {NAME_BYTES_MAX} bytes"))
            .remedy("choose a short name"));
    }
    if name.chars().any(char::is_control) {
        return Err(invalid(format!("the {what} {name:?}")).because("it contains control characters"));
    }
    Ok(())
}

fn check_layers(spec: &PoolSpec) -> Result<()> {
    for id in &spec.layers {
        check_name("layer id", id)?;
    }
    // Layers are listed in the order in which planes name them first, so that the list follows from the planes.
    let mut known = 0usize;
    for (index, plane) in spec.planes.iter().enumerate() {
        let layer = usize::from(plane.layer);
        if layer >= spec.layers.len() {
            return Err(Error::new(ErrorKind::OutOfBounds, format!("layer index {layer}"))
                .at(format!("plane {index}"))
                .because(format!("the pool has {} layers", spec.layers.len())));
        }
        if layer > known {
            return Err(invalid(format!("layer {:?} in the layer list", spec.layers[known]))
                .at(format!("plane {index}"))
                .because("layers are listed in the order in which planes first name them")
                .remedy("build the layout with PoolLayout::builder"));
        }
        if layer == known {
            known += 1;
        }
    }
    if known < spec.layers.len() {
        return Err(invalid(format!("layer {:?} without planes", spec.layers[known])).remedy("remove it"));
    }
    Ok(())
}

fn sorted_layers(layers: &[String]) -> Result<Vec<u16>> {
    let mut by_id: Vec<u16> = (0..layers.len()).map(|index| index as u16).collect();
    by_id.sort_unstable_by(|&a, &b| layers[a as usize].cmp(&layers[b as usize]));
    for pair in by_id.windows(2) {
        if layers[pair[0] as usize] == layers[pair[1] as usize] {
            return Err(invalid(format!("layer {:?} listed twice", layers[pair[0] as usize]))
                .because("layers match by id")
                .remedy("give each layer its own id"));
        }
    }
    Ok(by_id)
}

fn check_plane(spec: &PoolSpec, index: usize, plane: &Plane, local_heads: &[HeadRange]) -> Result<()> {
    let place = || layout_place(spec, index);
    let Some(group) = spec.groups.get(usize::from(plane.group)) else {
        return Err(
            Error::new(ErrorKind::OutOfBounds, format!("cache group {}", plane.group))
                .at(place())
                .because(format!("the pool has {}", spec.groups.len())),
        );
    };
    if plane.blocks != group.blocks {
        return Err(invalid(format!("{} blocks", plane.blocks))
            .at(place())
            .because(format!(
                "its cache group has {}, and a block id is the same slot in each plane",
                group.blocks
            ))
            .remedy("give all planes of a group the same number of blocks"));
    }
    check_kind(group, plane).map_err(|e| e.at(place()))?;
    check_heads(group, plane, local_heads[usize::from(plane.group)]).map_err(|e| e.at(place()))?;
    check_length(group, plane).map_err(|e| e.at(place()))?;
    let region = spec.regions.get(plane.region as usize).copied().ok_or_else(|| {
        Error::new(ErrorKind::OutOfBounds, format!("region {}", plane.region))
            .at(place())
            .because(format!("the pool has {} regions", spec.regions.len()))
    })?;
    match plane.end() {
        Some(end) if end <= region => Ok(()),
        end => Err(Error::new(
            ErrorKind::OutOfBounds,
            format!(
                "{} blocks of {} bytes at stride {} from offset {}",
                plane.blocks, plane.block_length, plane.stride, plane.base
            ),
        )
        .at(place())
        .because(match end {
            Some(end) => format!("they end at {end}, region {} has {region} bytes", plane.region),
            None => "their end overflows 64 bits".to_string(),
        })
        .remedy("correct base, stride or block count, or give a larger region")),
    }
}

fn check_kind(group: &CacheGroup, plane: &Plane) -> Result<()> {
    let fits = match plane.kind {
        PlaneKind::State => group.geometry.is_state(),
        PlaneKind::Latent => !group.geometry.is_state() && group.geometry.kv_heads == 0,
        _ => !group.geometry.is_state() && group.geometry.kv_heads > 0,
    };
    if !fits {
        return Err(invalid(format!("a {} plane", plane.kind))
            .because(format!(
                "its cache group {} has {} tokens per block and {} kv heads",
                group.name, group.geometry.tokens_per_block, group.geometry.kv_heads
            ))
            .remedy("K, V and fused planes need heads and tokens, latent planes tokens and no heads, states neither"));
    }
    let order_fits = match (plane.kind, plane.order) {
        (_, InnerOrder::Packed) => true,
        (PlaneKind::Key | PlaneKind::Value, InnerOrder::Single(_))
        | (PlaneKind::Fused, InnerOrder::Fused(_))
        | (PlaneKind::Latent, InnerOrder::Latent(_)) => {
            let axes = plane.order.axes();
            let has_kv = axes.contains(&super::Axis::Kv);
            let has_head = axes.contains(&super::Axis::Head);
            let distinct = axes
                .iter()
                .enumerate()
                .all(|(index, axis)| !axes[..index].contains(axis));
            distinct && has_kv == (plane.kind == PlaneKind::Fused) && has_head == (plane.kind != PlaneKind::Latent)
        }
        _ => false,
    };
    if !order_fits {
        return Err(
            invalid(format!("the inner order {} of a {} plane", plane.order, plane.kind))
                .because("it must name each of the plane's axes once")
                .remedy("K and V have token, head, dim; fused has kv too; latent has token, dim; states are packed"),
        );
    }
    if plane.kind == PlaneKind::Fused
        && plane.order != InnerOrder::Packed
        && group.geometry.head_size != group.geometry.value_head_size
    {
        return Err(invalid("a fused plane with unequal head sizes of K and V")
            .because("its kv axis would not be rectangular")
            .remedy("declare K and V as two interleaved planes, or the block as packed"));
    }
    Ok(())
}

fn check_heads(group: &CacheGroup, plane: &Plane, local: HeadRange) -> Result<()> {
    match plane.heads {
        None if group.geometry.kv_heads == 0 => Ok(()),
        None => Err(invalid(format!("a {} plane without heads", plane.kind))
            .because(format!("its cache group has {} kv heads", group.geometry.kv_heads))
            .remedy("give the head range it holds")),
        Some(heads) if group.geometry.kv_heads == 0 => {
            Err(invalid(format!("heads {heads} of a {} plane", plane.kind)).because("its cache group has no kv heads"))
        }
        Some(heads) if heads.start >= heads.end || heads.start < local.start || heads.end > local.end => Err(
            Error::new(ErrorKind::OutOfBounds, format!("heads {heads}")).because(format!(
                "this rank holds heads {local} ({} kv heads, {})",
                group.geometry.kv_heads, group.geometry.sharding
            )),
        ),
        Some(heads) if plane.kind == PlaneKind::State && heads != local => {
            Err(invalid(format!("heads {heads} of a state plane"))
                .because(format!("a state plane holds all of its rank's heads, {local}")))
        }
        Some(_) => Ok(()),
    }
}

fn check_length(group: &CacheGroup, plane: &Plane) -> Result<()> {
    if plane.kind == PlaneKind::State {
        let heads = u64::from(plane.heads.map_or(1, HeadRange::count));
        if plane.block_length == 0 || !plane.block_length.is_multiple_of(heads) {
            return Err(invalid(format!("a state block of {} bytes", plane.block_length))
                .because(format!("it must divide evenly into its {heads} heads")));
        }
    } else if plane.product(&group.geometry) != Some(plane.block_length) {
        let geometry = &group.geometry;
        return Err(
            invalid(format!("a {} block of {} bytes", plane.kind, plane.block_length))
                .because(format!(
                    "{} tokens x {} heads x {} elements of {} make {} bytes",
                    geometry.tokens_per_block,
                    plane.heads.map_or(1, HeadRange::count),
                    match plane.kind {
                        PlaneKind::Fused => geometry.head_size.saturating_add(geometry.value_head_size),
                        kind => geometry.head_size_of(kind),
                    },
                    geometry.dtype,
                    plane
                        .product(geometry)
                        .map_or("too many".to_string(), |bytes| bytes.to_string()),
                ))
                .remedy("correct the geometry or the block length; padding belongs into the stride"),
        );
    }
    if plane.blocks > 1 && plane.stride < plane.block_length {
        return Err(invalid(format!("a stride of {} bytes", plane.stride))
            .because(format!("its blocks of {} bytes would overlap", plane.block_length))
            .remedy("the stride is the distance from one block to the next, at least a block's length"));
    }
    Ok(())
}

fn planes_by_layer(spec: &PoolSpec) -> (Vec<u32>, Vec<u32>) {
    let mut starts = vec![0u32; spec.layers.len() + 1];
    for plane in &spec.planes {
        starts[usize::from(plane.layer) + 1] += 1;
    }
    for layer in 0..spec.layers.len() {
        starts[layer + 1] += starts[layer];
    }
    let mut next = starts.clone();
    let mut planes = vec![0u32; spec.planes.len()];
    for (index, plane) in spec.planes.iter().enumerate() {
        let slot = &mut next[usize::from(plane.layer)];
        planes[*slot as usize] = index as u32;
        *slot += 1;
    }
    (starts, planes)
}

/// Checks that the attention planes of a layer are in one group and that each kind covers the rank's heads once.
fn check_layer_planes(spec: &PoolSpec, layer: usize, planes: &[u32], local_heads: &[HeadRange]) -> Result<()> {
    let place = || format!("layer {}", spec.layers[layer]);
    let attention: Vec<&Plane> = planes
        .iter()
        .map(|&index| &spec.planes[index as usize])
        .filter(|plane| plane.kind.is_attention())
        .collect();
    let Some(first) = attention.first() else { return Ok(()) };
    if attention.iter().any(|plane| plane.group != first.group) {
        return Err(invalid("K and V of one layer in different cache groups")
            .at(place())
            .because("a request's blocks are listed per group")
            .remedy("put all attention planes of a layer into one group"));
    }
    let fused = attention.iter().filter(|plane| plane.kind == PlaneKind::Fused).count();
    if fused != 0 && fused != attention.len() {
        return Err(invalid("fused planes beside K or V planes")
            .at(place())
            .remedy("declare either"));
    }
    let local = local_heads[usize::from(first.group)];
    for kind in [PlaneKind::Key, PlaneKind::Value, PlaneKind::Fused] {
        let mut ranges: Vec<HeadRange> = attention
            .iter()
            .filter(|plane| plane.kind == kind)
            .filter_map(|plane| plane.heads)
            .collect();
        if ranges.is_empty() {
            continue;
        }
        ranges.sort_unstable_by_key(|heads| heads.start);
        let mut covered = local.start;
        for heads in &ranges {
            if heads.start != covered {
                let how = if heads.start < covered { "held twice" } else { "missing" };
                return Err(invalid(format!(
                    "heads {}..{} of the {kind} planes {how}",
                    heads.start.min(covered),
                    heads.start.max(covered)
                ))
                .at(place())
                .because(format!("this rank holds heads {local}, each once")));
            }
            covered = heads.end;
        }
        if covered != local.end {
            return Err(
                invalid(format!("heads {covered}..{} of the {kind} planes missing", local.end))
                    .at(place())
                    .because(format!("this rank holds heads {local}, each once")),
            );
        }
    }
    Ok(())
}

fn check_overlaps(spec: &PoolSpec) -> Result<()> {
    let refuse = |(left, right): (u32, u32), remedy: &str| {
        Err(invalid(format!(
            "{} overlaps {}",
            layout_place(spec, left as usize),
            layout_place(spec, right as usize)
        ))
        .at(format!("region {}", spec.planes[left as usize].region))
        .because("a byte can belong to one plane only")
        .remedy(remedy))
    };
    if !spec.shared_blocks {
        let all: Vec<u32> = (0..spec.planes.len() as u32).collect();
        return match find_overlap(&spec.planes, &all)? {
            Some(found) if spec.planes[found.0 as usize].group != spec.planes[found.1 as usize].group => refuse(
                found,
                "correct the bases, or declare shared_blocks if groups share their memory",
            ),
            Some(found) => refuse(found, "correct base, stride or block count"),
            None => Ok(()),
        };
    }
    for group in 0..spec.groups.len() {
        let planes: Vec<u32> = (0..spec.planes.len() as u32)
            .filter(|&index| spec.planes[index as usize].group as usize == group)
            .collect();
        if let Some(found) = find_overlap(&spec.planes, &planes)? {
            return refuse(found, "correct base, stride or block count");
        }
    }
    Ok(())
}

fn classify(spec: &PoolSpec) -> Result<(Vec<u16>, Vec<PlaneClass>)> {
    let mut numbers: HashMap<PlaneClass, u16> = HashMap::new();
    let mut classes = Vec::new();
    let mut of_planes = Vec::with_capacity(spec.planes.len());
    for plane in &spec.planes {
        let class = PlaneClass {
            group: plane.group,
            kind: plane.kind,
            heads: plane.heads,
            order: plane.order,
            block_length: plane.block_length,
        };
        let number = *numbers.entry(class).or_insert_with(|| {
            classes.push(class);
            // At most PLANES_MAX classes, which fits.
            (classes.len() - 1) as u16
        });
        of_planes.push(number);
    }
    Ok((of_planes, classes))
}

fn classify_layers(layer_starts: &[u32], layer_planes: &[u32], plane_classes: &[u16]) -> Vec<u16> {
    let mut numbers: HashMap<Vec<u16>, u16> = HashMap::new();
    layer_starts
        .windows(2)
        .map(|range| {
            let planes = &layer_planes[range[0] as usize..range[1] as usize];
            let classes = planes.iter().map(|&plane| plane_classes[plane as usize]).collect();
            // At most PLANES_MAX layers, which fits.
            let next = numbers.len() as u16;
            *numbers.entry(classes).or_insert(next)
        })
        .collect()
}

/// FNV-1a over everything declared that decides what bytes mean, and nothing that says where they are.
fn geometry_hash(spec: &PoolSpec) -> u64 {
    let mut hash = Fnv::default();
    for group in &spec.groups {
        let geometry = &group.geometry;
        let (rank, size) = geometry.sharding.rank();
        let how = match geometry.sharding {
            super::Sharding::Heads { .. } => 0,
            super::Sharding::Replicated { .. } => 1,
            super::Sharding::Tokens { .. } => 2,
        };
        hash.text(geometry.dtype.name());
        for number in [
            geometry.tokens_per_block,
            geometry.kv_heads,
            geometry.head_size,
            geometry.value_head_size,
            how,
            u32::from(rank),
            u32::from(size),
            group.window.unwrap_or(0),
        ] {
            hash.number(u64::from(number));
        }
    }
    for plane in &spec.planes {
        hash.text(&spec.layers[usize::from(plane.layer)]);
        hash.text(plane.kind.name());
        hash.text(&plane.order.to_string());
        hash.number(u64::from(plane.group));
        hash.number(plane.block_length);
        let heads = plane.heads.unwrap_or(HeadRange::new(0, 0));
        hash.number(u64::from(heads.start));
        hash.number(u64::from(heads.end));
    }
    hash.0
}

struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    fn bytes(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    fn number(&mut self, number: u64) {
        self.bytes(&number.to_le_bytes());
    }

    /// With its length, so that texts one after another stay apart.
    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.bytes(text.as_bytes());
    }
}

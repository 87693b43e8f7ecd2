//! Layouts: what a pool's memory means.

use std::ffi::c_char;
use std::sync::Arc;

use kvxfer::layout::{
    Arrangement, Axis, DType, Geometry, HeadOrder, InnerOrder, Model, PlaneArrangement, PlaneKind, PlaneSpec, Sharding,
};
use kvxfer::{Error, ErrorKind, PoolLayout, Result};

use crate::call::call;
use crate::input::{self, NAME_BYTES_MAX, TOML_BYTES_MAX, flag, grows, narrow, no_such};
use crate::output::{Out, OutStruct, OutText};
use crate::status::kvx_status;
use crate::table;

/// What a pool's memory means: groups, planes, layers. Checked once, when it is made. Freed by kvx_layout_free.
pub type kvx_layout = u64;

/// What is behind a layout handle.
pub struct Layout(pub(crate) Arc<PoolLayout>);

/// The type of one element of the cache.
pub type kvx_dtype = u32;
/// Raw bytes.
pub const KVX_DTYPE_U8: kvx_dtype = 1;
/// Eight-bit integers.
pub const KVX_DTYPE_I8: kvx_dtype = 2;
/// Eight-bit floats with four exponent bits.
pub const KVX_DTYPE_F8E4M3: kvx_dtype = 3;
/// Eight-bit floats with five exponent bits.
pub const KVX_DTYPE_F8E5M2: kvx_dtype = 4;
/// IEEE half precision.
pub const KVX_DTYPE_F16: kvx_dtype = 5;
/// Brain floats.
pub const KVX_DTYPE_BF16: kvx_dtype = 6;
/// IEEE single precision.
pub const KVX_DTYPE_F32: kvx_dtype = 7;

/// What the blocks of a cache group hold.
pub type kvx_group_kind = u32;
/// Keys and values with heads.
pub const KVX_GROUP_ATTENTION: kvx_group_kind = 1;
/// Rows without heads, as in multi-head latent attention.
pub const KVX_GROUP_LATENT: kvx_group_kind = 2;
/// Recurrent states: one block per request, no positions.
pub const KVX_GROUP_STATE: kvx_group_kind = 3;

/// How a cache group is divided among the ranks of its engine.
pub type kvx_sharding = u32;
/// One rank holds everything.
pub const KVX_SHARDING_NONE: kvx_sharding = 0;
/// By kv heads. With more ranks than heads, neighbouring ranks hold the same head.
pub const KVX_SHARDING_HEADS: kvx_sharding = 1;
/// Every rank holds everything.
pub const KVX_SHARDING_REPLICATED: kvx_sharding = 2;
/// By tokens: reserved, KVX_ERR_UNSUPPORTED today.
pub const KVX_SHARDING_TOKENS: kvx_sharding = 3;

/// What a plane's blocks hold.
pub type kvx_plane_kind = u32;
/// Keys.
pub const KVX_PLANE_KEY: kvx_plane_kind = 1;
/// Values.
pub const KVX_PLANE_VALUE: kvx_plane_kind = 2;
/// Keys and values in one block.
pub const KVX_PLANE_FUSED: kvx_plane_kind = 3;
/// Rows without heads.
pub const KVX_PLANE_LATENT: kvx_plane_kind = 4;
/// A recurrent state.
pub const KVX_PLANE_STATE: kvx_plane_kind = 5;

/// An axis inside a block. A plane's order names them from the outermost inwards.
pub type kvx_axis = u32;
/// K (0) or V (1), of fused planes.
pub const KVX_AXIS_KV: kvx_axis = 1;
/// The kv head.
pub const KVX_AXIS_HEAD: kvx_axis = 2;
/// The token in the block.
pub const KVX_AXIS_TOKEN: kvx_axis = 3;
/// The element in the head.
pub const KVX_AXIS_DIM: kvx_axis = 4;
/// Alone in an order: unknown below the head. Such blocks are moved whole, between equal block sizes.
pub const KVX_AXIS_PACKED: kvx_axis = 5;

/// How a model preset's planes lie in memory.
pub type kvx_arrangement = u32;
/// One plane after another, K and V of each layer.
pub const KVX_ARRANGEMENT_PER_LAYER: kvx_arrangement = 0;
/// One plane per layer, K and V in one block.
pub const KVX_ARRANGEMENT_FUSED: kvx_arrangement = 1;
/// One big block holds all layers of its group.
pub const KVX_ARRANGEMENT_BLOCK_MAJOR: kvx_arrangement = 2;
/// One plane per head, K and V apart.
pub const KVX_ARRANGEMENT_PER_HEAD: kvx_arrangement = 3;

/// A cache group: planes that share a block table.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_group_spec {
    /// sizeof(kvx_group_spec), the same in every element.
    pub struct_size: u32,
    /// What its blocks hold.
    pub kind: kvx_group_kind,
    /// A label for messages, at most 128 bytes.
    pub name: *const c_char,
    /// Blocks in each of its planes.
    pub blocks: u32,
    /// Element type. Not read for states.
    pub dtype: kvx_dtype,
    /// Tokens in one block. Not read for states.
    pub tokens_per_block: u32,
    /// Kv heads of the whole model. For states: in how many parts ranks may divide them (0: not at all). Not read for rows.
    pub kv_heads: u32,
    /// Elements of one head of one token; of one row. Not read for states.
    pub head_size: u32,
    /// The same of V, where it differs from K (0: it does not).
    pub value_head_size: u32,
    /// How it is divided among ranks.
    pub sharding: kvx_sharding,
    /// This rank.
    pub rank: u16,
    /// Of how many (0 stands for 1).
    pub size: u16,
    /// Tokens that its attention looks back, if it is a sliding window (0: it is not).
    pub window: u32,
    /// 0.
    pub reserved: u32,
}
grows!(kvx_group_spec, 56);

/// A plane: an array of blocks at a constant stride in a region. What is 0 follows from the group: blocks lie one after
/// another and hold all of the rank's heads in the usual order (token, head, dim).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_plane_spec {
    /// sizeof(kvx_plane_spec), the same in every element.
    pub struct_size: u32,
    /// What its blocks hold.
    pub kind: kvx_plane_kind,
    /// The layer's id, at most 128 bytes: layers of two pools match by it.
    pub layer: *const c_char,
    /// The cache group, as an index in the groups.
    pub group: u32,
    /// The region it lies in.
    pub region: u32,
    /// 1 if base is given; 0: it begins where the last plane of its region ended.
    pub has_base: u32,
    /// Axes in order; 0: the usual order of its kind.
    pub order_count: u32,
    /// Offset of block 0 in the region, in bytes.
    pub base: u64,
    /// Bytes from one block to the next; 0: the block length.
    pub stride: u64,
    /// Bytes of one block. Needed for states only; for others it is checked.
    pub block_length: u64,
    /// The first head it holds, counted over the whole model.
    pub first_head: u32,
    /// One past the last head it holds; 0: all of the rank's.
    pub head_end: u32,
    /// The axes inside a block, outermost first.
    pub order: [kvx_axis; 4],
}
grows!(kvx_plane_spec, 80);

/// A layout to be made. kvx_layout_create reads it and keeps nothing of it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_layout_spec {
    /// sizeof(kvx_layout_spec).
    pub struct_size: u32,
    /// 1 if planes of different groups may overlap, a block id belonging to one group at a time.
    pub shared_blocks: u32,
    /// The cache groups.
    pub groups: *const kvx_group_spec,
    /// How many.
    pub group_count: usize,
    /// The planes.
    pub planes: *const kvx_plane_spec,
    /// How many.
    pub plane_count: usize,
    /// Bytes of each region; 0 in it, and null: as many as its planes need.
    pub region_lengths: *const u64,
    /// How many.
    pub region_count: usize,
}
grows!(kvx_layout_spec, 56);

/// The layout of one rank of a model that is known by name.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_preset_spec {
    /// sizeof(kvx_preset_spec).
    pub struct_size: u32,
    /// How its planes lie in memory.
    pub arrangement: kvx_arrangement,
    /// The model: "llama-3.1-70b", ... An unknown name's message lists them.
    pub model: *const c_char,
    /// Models of one's own as TOML text, in the form of the presets' file, to find the model in; null: the presets.
    pub models_toml: *const c_char,
    /// This tensor-parallel rank.
    pub tensor_rank: u16,
    /// Of how many (0 stands for 1).
    pub tensor_size: u16,
    /// Tokens in one block.
    pub tokens_per_block: u32,
    /// Blocks in each group.
    pub blocks: u32,
    /// 1: head, token, dim inside a block; 0: token, head, dim.
    pub heads_first: u32,
    /// The first layer wanted, such as of a pipeline stage.
    pub first_layer: u32,
    /// One past the last layer wanted; 0: all.
    pub layer_end: u32,
}
grows!(kvx_preset_spec, 48);

/// What a layout has.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_layout_info {
    /// sizeof(kvx_layout_info), set by the caller.
    pub struct_size: u32,
    /// Cache groups.
    pub groups: u32,
    /// Planes.
    pub planes: u32,
    /// Layers.
    pub layers: u32,
    /// Regions.
    pub regions: u32,
    /// 1 if planes of different groups may overlap.
    pub shared_blocks: u32,
    /// A hash of everything declared in the geometry: equal on equal declarations.
    pub geometry_hash: u64,
}
grows!(kvx_layout_info, 32);

/// What a plane is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_plane_info {
    /// sizeof(kvx_plane_info), set by the caller.
    pub struct_size: u32,
    /// What its blocks hold.
    pub kind: kvx_plane_kind,
    /// Its layer, as an index in the layout's layers.
    pub layer: u32,
    /// Its cache group.
    pub group: u32,
    /// The region it lies in.
    pub region: u32,
    /// Blocks.
    pub blocks: u32,
    /// Offset of block 0 in the region, in bytes.
    pub base: u64,
    /// Bytes from one block to the next.
    pub stride: u64,
    /// Bytes of one block.
    pub block_length: u64,
}
grows!(kvx_plane_info, 48);

/// Makes a layout, group by group and plane by plane. Errors name the group or plane and the field.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_layout_create(spec: *const kvx_layout_spec, layout: *mut kvx_layout) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, made) = unsafe {
            let out = Out::handle("layout", layout)?;
            let spec = input::required(spec)?;
            let groups = input::structs(spec.groups, spec.group_count)?;
            let planes = input::structs(spec.planes, spec.plane_count)?;
            let regions = input::array("region_lengths", spec.region_lengths, spec.region_count)?;
            (
                out,
                build(&groups, &planes, regions, flag("shared_blocks", spec.shared_blocks)?)?,
            )
        };
        insert(made, &out)
    })
}

/// A layout of blocks of raw bytes in one region: one group, one plane, layer "0". What selections call tokens are
/// blocks then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_layout_opaque(block_bytes: u32, blocks: u32, layout: *mut kvx_layout) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointer, as the crate's contract says.
        let out = unsafe { Out::handle("layout", layout)? };
        insert(PoolLayout::opaque(block_bytes, blocks)?, &out)
    })
}

/// The layout of one rank of a model that is known by name, in one region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_layout_preset(spec: *const kvx_preset_spec, layout: *mut kvx_layout) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, spec, name, models) = unsafe {
            let out = Out::handle("layout", layout)?;
            let spec = input::required(spec)?;
            let name = input::text("model", spec.model, NAME_BYTES_MAX)?;
            let models = match spec.models_toml.is_null() {
                true => None,
                false => Some(input::text("models_toml", spec.models_toml, TOML_BYTES_MAX)?),
            };
            (out, spec, name, models)
        };
        let model = match models {
            None => Model::preset(name)?,
            Some(text) => own_model(name, text)?,
        };
        let arrangement = Arrangement {
            planes: match spec.arrangement {
                KVX_ARRANGEMENT_PER_LAYER => PlaneArrangement::PerLayer,
                KVX_ARRANGEMENT_FUSED => PlaneArrangement::Fused,
                KVX_ARRANGEMENT_BLOCK_MAJOR => PlaneArrangement::BlockMajor,
                KVX_ARRANGEMENT_PER_HEAD => PlaneArrangement::PerHead,
                other => return Err(no_such("arrangement", other)),
            },
            order: match flag("heads_first", spec.heads_first)? {
                true => HeadOrder::Hnd,
                false => HeadOrder::Nhd,
            },
        };
        let wanted = |layer: u16| {
            let layer = u32::from(layer);
            layer >= spec.first_layer && (spec.layer_end == 0 || layer < spec.layer_end)
        };
        let (rank, size) = (spec.tensor_rank, spec.tensor_size.max(1));
        let (tokens, blocks) = (spec.tokens_per_block, spec.blocks);
        insert(
            model.layout_of_layers(rank, size, tokens, blocks, arrangement, wanted)?,
            &out,
        )
    })
}

/// What it has.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_layout_describe(layout: kvx_layout, info: *mut kvx_layout_info) -> kvx_status {
    call(|| {
        let layout = &table::get::<Layout>(layout)?.0;
        // SAFETY: the caller's struct, as the crate's contract says.
        let out = unsafe { OutStruct::new(info)? };
        // The library's own limits are far below 2^32.
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        out.put(kvx_layout_info {
            struct_size: 0,
            groups: count(layout.groups()),
            planes: count(layout.planes().len()),
            layers: count(layout.layers().len()),
            regions: count(layout.region_lengths().len()),
            shared_blocks: u32::from(layout.shared_blocks()),
            geometry_hash: layout.geometry_hash(),
        });
        Ok(())
    })
}

/// The id of a layer. Gives the text's length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_layout_layer_name(
    layout: kvx_layout,
    layer: u32,
    buffer: *mut c_char,
    capacity: usize,
) -> i64 {
    call(|| {
        let layout = &table::get::<Layout>(layout)?.0;
        // SAFETY: the caller's buffer, as the crate's contract says.
        let out = unsafe { OutText::new(buffer, capacity)? };
        let names = layout.layers();
        let name = names
            .get(layer as usize)
            .ok_or_else(|| beyond("layer", layer, names.len()))?;
        Ok(out.put(name))
    })
}

/// The index of the layer with this id. KVX_ERR_OUT_OF_BOUNDS if there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_layout_layer_index(
    layout: kvx_layout,
    name: *const c_char,
    layer: *mut u32,
) -> kvx_status {
    call(|| {
        let layout = &table::get::<Layout>(layout)?.0;
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, name) = unsafe { (Out::new("layer", layer)?, input::text("name", name, NAME_BYTES_MAX)?) };
        let index = layout.layer_index(name).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, format!("layer {name:?}"))
                .because("the layout has no layer with this id")
                .remedy("kvx_layout_layer_name gives those it has")
        })?;
        out.put(u32::from(index));
        Ok(())
    })
}

/// Bytes that a region must have.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_layout_region_length(layout: kvx_layout, region: u32, length: *mut u64) -> kvx_status {
    call(|| {
        let layout = &table::get::<Layout>(layout)?.0;
        // SAFETY: the caller's pointer, as the crate's contract says.
        let out = unsafe { Out::new("length", length)? };
        let lengths = layout.region_lengths();
        let found = lengths.get(region as usize);
        out.put(*found.ok_or_else(|| beyond("region", region, lengths.len()))?);
        Ok(())
    })
}

/// What a plane is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_layout_plane(layout: kvx_layout, plane: u32, info: *mut kvx_plane_info) -> kvx_status {
    call(|| {
        let layout = &table::get::<Layout>(layout)?.0;
        // SAFETY: the caller's struct, as the crate's contract says.
        let out = unsafe { OutStruct::new(info)? };
        let planes = layout.planes();
        let found = planes
            .get(plane as usize)
            .ok_or_else(|| beyond("plane", plane, planes.len()))?;
        out.put(kvx_plane_info {
            struct_size: 0,
            kind: match found.kind {
                PlaneKind::Key => KVX_PLANE_KEY,
                PlaneKind::Value => KVX_PLANE_VALUE,
                PlaneKind::Fused => KVX_PLANE_FUSED,
                PlaneKind::Latent => KVX_PLANE_LATENT,
                PlaneKind::State => KVX_PLANE_STATE,
            },
            layer: u32::from(found.layer),
            group: u32::from(found.group),
            region: found.region,
            blocks: found.blocks,
            base: found.base,
            stride: found.stride,
            block_length: found.block_length,
        });
        Ok(())
    })
}

/// Frees a layout. Pools made with it are not touched.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_layout_free(layout: kvx_layout) -> kvx_status {
    call(|| table::remove::<Layout>(layout).map(drop))
}

fn insert(layout: PoolLayout, out: &Out<u64>) -> Result<()> {
    out.put(table::insert(Layout(Arc::new(layout)))?);
    Ok(())
}

/// An index beyond what there is.
pub(crate) fn beyond(what: &str, index: u32, count: usize) -> Error {
    Error::new(ErrorKind::OutOfBounds, format!("{what} {index}"))
        .because(format!("there are {count}"))
        .remedy(format!("count {what}s from 0"))
}

fn own_model(name: &str, text: &str) -> Result<Model> {
    let models = Model::from_toml(text)?;
    let names: Vec<String> = models.iter().map(|model| model.name.clone()).collect();
    let found = models.into_iter().find(|model| model.name == name);
    found.ok_or_else(|| {
        Error::new(ErrorKind::InvalidArgument, format!("model {name:?}"))
            .because(format!("the text has {}", names.join(", ")))
            .remedy("name one of them")
    })
}

/// # Safety
/// Texts that the specs point to are the caller's, as the header says.
unsafe fn build(
    groups: &[kvx_group_spec],
    planes: &[kvx_plane_spec],
    regions: &[u64],
    shared_blocks: bool,
) -> Result<PoolLayout> {
    let mut builder = PoolLayout::builder();
    for (index, group) in groups.iter().enumerate() {
        let place = |error: Error| error.at(format!("group {index}"));
        // SAFETY: the caller's word.
        let name = unsafe { input::text("name", group.name, NAME_BYTES_MAX).map_err(place)? };
        let number = builder.group(name, geometry(group).map_err(place)?, group.blocks);
        if group.window > 0 {
            builder.window(number, group.window);
        }
    }
    for (index, plane) in planes.iter().enumerate() {
        let place = |error: Error| error.at(format!("plane {index}"));
        // SAFETY: the caller's word.
        let layer = unsafe { input::text("layer", plane.layer, NAME_BYTES_MAX).map_err(place)? };
        builder.plane(plane_spec(plane, layer).map_err(place)?);
    }
    for (region, &length) in (0u32..).zip(regions) {
        if length > 0 {
            builder.region(region, length);
        }
    }
    if shared_blocks {
        builder.shared_blocks();
    }
    builder.build()
}

fn geometry(group: &kvx_group_spec) -> Result<Geometry> {
    let (rank, size) = (group.rank, group.size.max(1));
    let sharding = match group.sharding {
        KVX_SHARDING_NONE => Sharding::NONE,
        KVX_SHARDING_HEADS => Sharding::Heads { rank, size },
        KVX_SHARDING_REPLICATED => Sharding::Replicated { rank, size },
        KVX_SHARDING_TOKENS => Sharding::Tokens { rank, size },
        other => return Err(no_such("sharding", other)),
    };
    if group.kind == KVX_GROUP_STATE {
        return Ok(Geometry::state(group.kv_heads, sharding));
    }
    let dtype = match group.dtype {
        KVX_DTYPE_U8 => DType::U8,
        KVX_DTYPE_I8 => DType::I8,
        KVX_DTYPE_F8E4M3 => DType::F8E4M3,
        KVX_DTYPE_F8E5M2 => DType::F8E5M2,
        KVX_DTYPE_F16 => DType::F16,
        KVX_DTYPE_BF16 => DType::Bf16,
        KVX_DTYPE_F32 => DType::F32,
        other => return Err(no_such("dtype", other)),
    };
    if group.tokens_per_block == 0 {
        return Err(Error::new(ErrorKind::InvalidArgument, "tokens_per_block = 0")
            .because("only groups of states have no tokens")
            .remedy("set it, or set the kind to KVX_GROUP_STATE"));
    }
    match group.kind {
        KVX_GROUP_ATTENTION => {
            let geometry =
                Geometry::attention(dtype, group.tokens_per_block, group.kv_heads, group.head_size, sharding);
            Ok(match group.value_head_size {
                0 => geometry,
                own => geometry.with_value_head_size(own),
            })
        }
        KVX_GROUP_LATENT => Ok(Geometry::latent(
            dtype,
            group.tokens_per_block,
            group.head_size,
            sharding,
        )),
        other => Err(no_such("kind", other)),
    }
}

fn plane_spec(plane: &kvx_plane_spec, layer: &str) -> Result<PlaneSpec> {
    let kind = match plane.kind {
        KVX_PLANE_KEY => PlaneKind::Key,
        KVX_PLANE_VALUE => PlaneKind::Value,
        KVX_PLANE_FUSED => PlaneKind::Fused,
        KVX_PLANE_LATENT => PlaneKind::Latent,
        KVX_PLANE_STATE => PlaneKind::State,
        other => return Err(no_such("kind", other)),
    };
    let mut spec = PlaneSpec::new(narrow("group", plane.group)?, layer, kind).region(plane.region);
    if flag("has_base", plane.has_base)? {
        spec = spec.base(plane.base);
    }
    if plane.stride > 0 {
        spec = spec.stride(plane.stride);
    }
    if plane.block_length > 0 {
        spec = spec.block_length(plane.block_length);
    }
    if plane.head_end > 0 {
        spec = spec.heads(plane.first_head..plane.head_end);
    }
    Ok(match order(plane)? {
        Some(order) => spec.order(order),
        None => spec,
    })
}

fn order(plane: &kvx_plane_spec) -> Result<Option<InnerOrder>> {
    let axes = plane.order.get(..plane.order_count as usize).ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidArgument,
            format!("order_count = {}", plane.order_count),
        )
        .because("a block has at most 4 axes")
    })?;
    if axes == [KVX_AXIS_PACKED] {
        return Ok(Some(InnerOrder::Packed));
    }
    let axes = axes.iter().map(|&axis| match axis {
        KVX_AXIS_KV => Ok(Axis::Kv),
        KVX_AXIS_HEAD => Ok(Axis::Head),
        KVX_AXIS_TOKEN => Ok(Axis::Token),
        KVX_AXIS_DIM => Ok(Axis::Dim),
        other => Err(no_such("order", other)),
    });
    let axes = axes.collect::<Result<Vec<Axis>>>()?;
    Ok(match *axes.as_slice() {
        [] => None,
        [first, second] => Some(InnerOrder::Latent([first, second])),
        [first, second, third] => Some(InnerOrder::Single([first, second, third])),
        [first, second, third, fourth] => Some(InnerOrder::Fused([first, second, third, fourth])),
        _ => {
            return Err(Error::new(ErrorKind::InvalidArgument, "an order of one axis")
                .remedy("give 2, 3 or 4 axes, or KVX_AXIS_PACKED alone"));
        }
    })
}

//! What of a request is meant: selections, targets, descriptors.

use kvxfer::layout::HeadRange;
use kvxfer::{BlockDescriptor, Error, ErrorKind, GroupSelection, Result, Scope, Selection, Target};

use crate::input::{self, grows};

/// The tokens first_token to token_end (exclusive) of a request in one cache group, and the blocks that hold them, in
/// token order. A group of states has one block and tokens 0 to 0; no blocks and no tokens say that nothing is meant.
/// A selection is an array of these, one per cache group of the pool. This struct never changes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_group_selection {
    /// First token meant, counted in the request.
    pub first_token: u32,
    /// One past the last token meant.
    pub token_end: u32,
    /// The blocks.
    pub blocks: *const u32,
    /// How many.
    pub block_count: usize,
}

/// Bytes of one block of one plane: the explicit form. This struct never changes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_descriptor {
    /// Index of the plane in the layout.
    pub plane: u32,
    /// The block.
    pub block: u32,
    /// First byte inside the block.
    pub offset: u32,
    /// Bytes.
    pub length: u32,
}

/// Kv heads, counted over the whole model. This struct never changes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_head_range {
    /// The first head.
    pub first: u32,
    /// One past the last head.
    pub end: u32,
}

/// What a grant, push or pull covers: a selection, with the layers and heads meant; or descriptors.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_target {
    /// sizeof(kvx_target).
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// The selection, one entry per cache group; null with descriptors.
    pub groups: *const kvx_group_selection,
    /// How many.
    pub group_count: usize,
    /// The layers meant, as ascending indices in the layout's layers; null: all.
    pub layers: *const u16,
    /// How many.
    pub layer_count: usize,
    /// The heads meant, one range per cache group; null: all.
    pub heads: *const kvx_head_range,
    /// How many.
    pub head_count: usize,
    /// Explicit pieces, moved in this order; null with a selection.
    pub descriptors: *const kvx_descriptor,
    /// How many.
    pub descriptor_count: usize,
}
grows!(kvx_target, 72);

/// The selection in an array of the caller's.
///
/// # Safety
/// `groups` is null or points to `count` entries, whose blocks are the caller's too.
pub(crate) unsafe fn selection(groups: *const kvx_group_selection, count: usize) -> Result<Selection> {
    // SAFETY: the caller's word.
    let groups = unsafe { input::array("groups", groups, count)? };
    let mut all = Vec::with_capacity(groups.len());
    for group in groups {
        // SAFETY: the caller's word.
        let blocks = unsafe { input::array("blocks", group.blocks, group.block_count)? };
        all.push(GroupSelection {
            first_token: group.first_token,
            token_end: group.token_end,
            blocks: blocks.to_vec(),
        });
    }
    Ok(Selection { groups: all })
}

/// What a target of the caller's covers.
///
/// # Safety
/// `target` is null or points to a target, whose arrays are the caller's too.
pub(crate) unsafe fn target(target: *const kvx_target) -> Result<Target> {
    // SAFETY: the caller's word.
    let target = unsafe { input::required(target)? };
    if target.descriptor_count > 0 {
        if target.group_count > 0 || target.layer_count > 0 || target.head_count > 0 {
            return Err(
                Error::new(ErrorKind::InvalidArgument, "a target of descriptors and groups")
                    .because("descriptors say exactly which bytes are meant")
                    .remedy("give either descriptors, or a selection with its layers and heads"),
            );
        }
        // SAFETY: the caller's word.
        let descriptors = unsafe { input::array("descriptors", target.descriptors, target.descriptor_count)? };
        let descriptors = descriptors.iter().map(|descriptor| BlockDescriptor {
            plane: descriptor.plane,
            block: descriptor.block,
            offset: descriptor.offset,
            length: descriptor.length,
        });
        return Ok(Target::Descriptors(descriptors.collect()));
    }
    // SAFETY: the caller's word.
    let (selection, layers, heads) = unsafe {
        (
            selection(target.groups, target.group_count)?,
            input::array("layers", target.layers, target.layer_count)?,
            input::array("heads", target.heads, target.head_count)?,
        )
    };
    let heads = heads.iter().map(|range| HeadRange::new(range.first, range.end));
    let scope = Scope {
        layers: layers.to_vec(),
        heads: (target.head_count > 0).then(|| heads.collect()),
    };
    Ok(Target::Selection { selection, scope })
}

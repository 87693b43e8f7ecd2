//! Selections: which tokens of a request, in which blocks.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::{BlockId, CacheGroup, PoolLayout};
use crate::error::{Error, ErrorKind, Result};

/// What of a request is meant, per cache group.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Selection {
    /// One entry per cache group of the pool, in order.
    pub groups: Vec<GroupSelection>,
}

impl Selection {
    /// The selection of a pool with one cache group.
    pub fn single(first_token: u32, token_end: u32, blocks: Vec<BlockId>) -> Self {
        Selection {
            groups: vec![GroupSelection {
                first_token,
                token_end,
                blocks,
            }],
        }
    }

    /// All blocks given, as if each held `tokens_per_block` tokens from position 0 on: what opaque pools want.
    pub fn whole_blocks(tokens_per_block: u32, blocks: Vec<BlockId>) -> Self {
        let tokens = u32::try_from(blocks.len()).unwrap_or(u32::MAX);
        Selection::single(0, tokens.saturating_mul(tokens_per_block), blocks)
    }
}

/// The tokens `first_token..token_end` of the request, and the blocks that hold them, in token order. The first
/// block holds token `first_token - first_token % tokens_per_block` in its first slot. A state group has one block
/// and `first_token == token_end == 0`. No blocks and no tokens say that nothing of the group is meant.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GroupSelection {
    /// First token position meant.
    pub first_token: u32,
    /// One past the last token position meant.
    pub token_end: u32,
    /// The blocks.
    pub blocks: Vec<BlockId>,
}

impl GroupSelection {
    /// The one block of a state group.
    pub fn state(block: BlockId) -> Self {
        GroupSelection {
            first_token: 0,
            token_end: 0,
            blocks: vec![block],
        }
    }

    /// Whether nothing is meant.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
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

impl PoolLayout {
    /// Checks that each group's blocks exist, are distinct, and hold exactly the selected tokens. In a pool with
    /// `shared_blocks` a block may also not be in two groups at a time.
    ///
    /// # Errors
    /// `InvalidArgument` for a wrong number of groups or blocks, a repeated block, or a start inside a block of packed
    /// planes; `OutOfBounds` for a block that does not exist.
    pub fn check(&self, selection: &Selection) -> Result<()> {
        self.check_group_count(selection)?;
        let mut seen = BlockSet::new(self.widest_group());
        for (index, chosen) in selection.groups.iter().enumerate() {
            let group = &self.cache_groups()[index];
            self.check_shape(index, chosen)?;
            check_range(group, &chosen.blocks)?;
            if !self.shared_blocks() {
                seen.clear();
            }
            for &block in &chosen.blocks {
                if !seen.insert(block) {
                    return Err(
                        Error::new(ErrorKind::InvalidArgument, format!("block {block} is selected twice"))
                            .at(place(group))
                            .because("two positions of a request cannot share a block")
                            .remedy("give each block once"),
                    );
                }
            }
        }
        Ok(())
    }

    /// Adds what follows: per group the tokens of `more` continue where `selection` ends (or begin it). Where the last
    /// block was not full, `more` repeats it as its first block.
    ///
    /// # Errors
    /// Those of [`check`](Self::check), and `InvalidArgument` if the tokens leave a gap, go back, or go on in another
    /// block than the one that is half full.
    pub fn append(&self, selection: &mut Selection, more: &Selection) -> Result<()> {
        self.check(more)?;
        if selection.groups.is_empty() {
            selection.groups.resize(self.groups(), GroupSelection::default());
        }
        self.check_group_count(selection)?;
        let mut grown = selection.clone();
        for (index, (have, new)) in grown.groups.iter_mut().zip(&more.groups).enumerate() {
            append_group(&self.cache_groups()[index], have, new)?;
        }
        self.check(&grown)?;
        *selection = grown;
        Ok(())
    }

    /// What of a selection holds these tokens, by whole blocks; and the state blocks, if they are meant too.
    pub(crate) fn restrict(&self, selection: &Selection, tokens: (u32, u32), states: bool) -> Selection {
        let groups = selection.groups.iter().zip(self.cache_groups());
        Selection {
            groups: groups
                .map(|(chosen, group)| restrict(group, chosen, tokens, states))
                .collect(),
        }
    }

    pub(crate) fn check_group_count(&self, selection: &Selection) -> Result<()> {
        if selection.groups.len() == self.groups() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("a selection of {} cache groups", selection.groups.len()),
        )
        .because(format!("the pool has {}", self.groups()))
        .remedy("give one entry per cache group, empty where nothing is meant"))
    }

    /// Checks numbers of one group that do not need the block ids.
    pub(crate) fn check_shape(&self, index: usize, chosen: &GroupSelection) -> Result<()> {
        let group = &self.cache_groups()[index];
        if group.geometry.is_state() {
            return check_state_shape(group, chosen);
        }
        let tokens_per_block = group.geometry.tokens_per_block;
        if chosen.first_token > chosen.token_end {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("tokens {}..{}", chosen.first_token, chosen.token_end),
            )
            .at(place(group))
            .because("the end lies before the beginning"));
        }
        let needed = if chosen.first_token == chosen.token_end {
            0
        } else {
            chosen.token_end.div_ceil(tokens_per_block) - chosen.first_token / tokens_per_block
        };
        if chosen.blocks.len() as u64 != u64::from(needed) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "{} blocks for tokens {}..{}",
                    chosen.blocks.len(),
                    chosen.first_token,
                    chosen.token_end
                ),
            )
            .at(place(group))
            .because(format!(
                "at {tokens_per_block} tokens per block these tokens lie in {needed} blocks"
            ))
            .remedy("select whole blocks around the tokens, in token order"));
        }
        if self.group_is_packed(index) && !chosen.first_token.is_multiple_of(tokens_per_block) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("a selection that starts at token {}", chosen.first_token),
            )
            .at(place(group))
            .because("packed planes move whole blocks, which would overwrite the tokens before it")
            .remedy(format!(
                "start at a multiple of {tokens_per_block} tokens, or declare the inner order"
            )));
        }
        Ok(())
    }
}

fn restrict(group: &CacheGroup, chosen: &GroupSelection, tokens: (u32, u32), states: bool) -> GroupSelection {
    if group.geometry.is_state() {
        return if states {
            chosen.clone()
        } else {
            GroupSelection::default()
        };
    }
    let tokens_per_block = group.geometry.tokens_per_block;
    let first_block = chosen.first_token / tokens_per_block;
    let start = (tokens.0 / tokens_per_block).max(first_block);
    let end = tokens
        .1
        .min(chosen.token_end)
        .div_ceil(tokens_per_block)
        .min(first_block.saturating_add(chosen.blocks.len() as u32));
    if start >= end {
        return GroupSelection::default();
    }
    GroupSelection {
        first_token: chosen.first_token.max(start * tokens_per_block),
        token_end: chosen.token_end.min(end.saturating_mul(tokens_per_block)),
        blocks: chosen.blocks[(start - first_block) as usize..(end - first_block) as usize].to_vec(),
    }
}

/// Checks that all blocks exist.
pub(crate) fn check_range(group: &CacheGroup, blocks: &[BlockId]) -> Result<()> {
    // The maximum is found without a branch per block; the culprit is looked for only when there is one.
    let highest = blocks.iter().copied().max().unwrap_or(0);
    if blocks.is_empty() || highest < group.blocks {
        return Ok(());
    }
    Err(Error::new(ErrorKind::OutOfBounds, format!("block {highest}"))
        .at(place(group))
        .because(format!("the group has {} blocks", group.blocks))
        .remedy(format!("use block ids below {}", group.blocks)))
}

pub(crate) fn place(group: &CacheGroup) -> String {
    format!("cache group {}", group.name)
}

fn check_state_shape(group: &CacheGroup, chosen: &GroupSelection) -> Result<()> {
    if chosen.first_token == 0 && chosen.token_end == 0 && chosen.blocks.len() <= 1 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidArgument,
        format!(
            "{} blocks for tokens {}..{}",
            chosen.blocks.len(),
            chosen.first_token,
            chosen.token_end
        ),
    )
    .at(place(group))
    .because("a state group has one block and no positions")
    .remedy("give one block (or none) and tokens 0..0"))
}

fn append_group(group: &CacheGroup, have: &mut GroupSelection, new: &GroupSelection) -> Result<()> {
    if new.is_empty() {
        return Ok(());
    }
    if have.is_empty() {
        *have = new.clone();
        return Ok(());
    }
    let refuse = |what: String, why: String| {
        Err(Error::new(ErrorKind::InvalidArgument, what)
            .at(place(group))
            .because(why)
            .remedy("append where the last append ended"))
    };
    if group.geometry.is_state() {
        return refuse(
            "a second state block".into(),
            "a state group has one block per request".into(),
        );
    }
    if new.first_token != have.token_end {
        return refuse(
            format!("an append that starts at token {}", new.first_token),
            format!("the tokens so far end at {}", have.token_end),
        );
    }
    let half_full = !have.token_end.is_multiple_of(group.geometry.tokens_per_block);
    if half_full && have.blocks.last() != new.blocks.first() {
        return refuse(
            format!("an append that goes on in block {}", new.blocks[0]),
            format!(
                "token {} lies in the half-full block {}",
                new.first_token,
                have.blocks[have.blocks.len() - 1]
            ),
        );
    }
    have.blocks.extend_from_slice(&new.blocks[usize::from(half_full)..]);
    have.token_end = new.token_end;
    Ok(())
}

/// Pools up to this many blocks are checked with one bit per block (at most 128 KiB), larger ones by hashing.
const BITSET_BLOCKS_MAX: u32 = 1 << 20;

/// Which blocks have been seen.
enum BlockSet {
    Bits(Vec<u64>),
    Hashes(HashSet<BlockId>),
}

impl BlockSet {
    fn new(blocks: u32) -> BlockSet {
        if blocks <= BITSET_BLOCKS_MAX {
            BlockSet::Bits(vec![0; blocks.div_ceil(64) as usize])
        } else {
            BlockSet::Hashes(HashSet::new())
        }
    }

    fn clear(&mut self) {
        match self {
            BlockSet::Bits(words) => words.fill(0),
            BlockSet::Hashes(blocks) => blocks.clear(),
        }
    }

    /// False if it was there already.
    fn insert(&mut self, block: BlockId) -> bool {
        match self {
            BlockSet::Bits(words) => {
                let word = &mut words[(block / 64) as usize];
                let bit = 1u64 << (block % 64);
                let fresh = *word & bit == 0;
                *word |= bit;
                fresh
            }
            BlockSet::Hashes(blocks) => blocks.insert(block),
        }
    }
}

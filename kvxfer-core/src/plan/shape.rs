//! How one plane's part of a stream is found in the planes of one side.
//!
//! The destination plane gives the order: its axes, outermost first. The side gives places: each *atom* is one of its
//! planes with the kv values and heads that it holds of the destination plane. An axis is *cut* where a walk along it
//! leaves an atom (kv, head) or a block of the side (token). Inside the innermost cut everything is a plain [`Nest`].

use super::nest::{AXES, Nest, SidePlane, Sink, slot};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::{Axis, BlockId, HeadRange, InnerOrder, PlaneClass, PlaneKind, PoolLayout};

/// The inside of a plane's blocks. Packed blocks and states count as one token each.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inside {
    pub(super) order: [Axis; AXES],
    pub(super) counts: [u64; AXES],
    pub(super) strides: [u64; AXES],
    pub(super) element: u64,
    pub(super) tokens_per_block: u64,
}

impl Inside {
    pub(super) fn of(layout: &PoolLayout, class: &PlaneClass) -> Inside {
        let geometry = &layout.cache_groups()[usize::from(class.group)].geometry;
        let heads = u64::from(class.heads.map_or(1, HeadRange::count));
        let mut inside = Inside {
            order: [Axis::Kv, Axis::Token, Axis::Head, Axis::Dim],
            counts: [1, heads, 1, class.block_length / heads],
            strides: [0, class.block_length / heads, class.block_length, 1],
            element: 1,
            tokens_per_block: 1,
        };
        let axes = class.order.axes();
        if axes.is_empty() {
            return inside;
        }
        inside.element = geometry.dtype.bytes();
        inside.tokens_per_block = u64::from(geometry.tokens_per_block);
        inside.counts = [
            u64::from(class.kind.kv_count()),
            heads,
            inside.tokens_per_block,
            u64::from(geometry.head_size_of(class.kind)),
        ];
        // Axes that the order does not name have one value: they go outermost.
        inside.order = {
            let mut order = [Axis::Kv, Axis::Head, Axis::Token, Axis::Dim];
            order.sort_by_key(|axis| axes.iter().position(|named| named == axis).map_or(0, |place| place + 1));
            order
        };
        let mut stride = inside.element;
        for &axis in inside.order.iter().rev() {
            inside.strides[slot(axis)] = stride;
            stride *= inside.counts[slot(axis)];
        }
        inside
    }
}

/// Which blocks, by number counted from the request's token 0, hold the units `start..end` of a part: tokens, or
/// whole blocks for packed planes and states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Units {
    pub(super) start: u64,
    pub(super) end: u64,
}

/// One of the side's planes, by class, and the part of the destination plane that it holds.
#[derive(Debug, Clone)]
pub(super) struct Atom {
    /// First and one past the last kv value, counted in the destination plane.
    kv: (u64, u64),
    /// The same of heads, counted from the first one moved.
    heads: (u64, u64),
    /// Of the first kv value and head, in a block.
    offset: u64,
    strides: [u64; AXES],
    /// Along the cut axis, of a full piece, and its nest in a full destination block.
    piece: u64,
    nest: Nest,
}

/// A destination plane class met with the side's classes, for one part.
#[derive(Debug)]
pub(super) struct Shape {
    order: [Axis; AXES],
    /// By axis slot; the token entry is that of a full destination block.
    counts: [u64; AXES],
    element: u64,
    unit_bytes: u64,
    units: Units,
    tokens_per_block: u64,
    side_tokens_per_block: u64,
    /// Number of the first selected block of the side.
    side_first_block: u64,
    pub(super) side_group: u16,
    atoms: Vec<Atom>,
    /// Where in `order` the innermost cut is.
    cut: Option<usize>,
    /// Whether a piece's nest depends on how many tokens the block has.
    token_inside_cut: bool,
    /// Of a full destination block, if nothing is cut.
    full: Nest,
    /// No two of the side's blocks in the part lie one behind the other.
    scattered: bool,
}

/// What a shape is made of.
pub(super) struct ShapeInput<'a> {
    pub(super) destination: &'a PlaneClass,
    pub(super) inside: Inside,
    /// The destination's heads that are moved.
    pub(super) heads: Option<HeadRange>,
    pub(super) units: Units,
    pub(super) side_layout: &'a PoolLayout,
    /// The side's planes that hold parts of it, as classes with the heads that may be used.
    pub(super) side: &'a [(u16, Option<HeadRange>)],
    /// First token selected on the side.
    pub(super) side_first_token: u32,
}

impl Shape {
    /// Works out the shape. The side must match in dtype, head sizes and packing (see `pair`).
    pub(super) fn new(input: &ShapeInput<'_>) -> Result<Shape> {
        let mut counts = input.inside.counts;
        counts[slot(Axis::Head)] = u64::from(input.heads.map_or(1, HeadRange::count));
        let mut atoms = Vec::with_capacity(input.side.len());
        for &(class, usable) in input.side {
            atoms.extend(atom(input, input.side_layout.class(class), usable));
        }
        if atoms.len() != input.side.len() || atoms.is_empty() {
            // `pair` names only planes with heads in common.
            return Err(Error::new(
                ErrorKind::Internal,
                "a source plane without heads of the destination plane",
            ));
        }
        check_covered(input, &counts, &atoms)?;
        let side_class = input.side_layout.class(input.side[0].0);
        let side_inside = Inside::of(input.side_layout, side_class);
        let side_group = &input.side_layout.cache_groups()[usize::from(side_class.group)];
        // In packed planes and states the units are blocks.
        let side_first_block =
            u64::from(input.side_first_token) / u64::from(side_group.geometry.tokens_per_block.max(1));
        let unit_bytes =
            counts[slot(Axis::Kv)] * counts[slot(Axis::Head)] * counts[slot(Axis::Dim)] * input.inside.element;
        let order = input.inside.order;
        // With the tokens outermost the stream runs through them whatever the destination's blocks: the side's own
        // blocks are the better steps then.
        let outermost = order.iter().find(|&&axis| counts[slot(axis)] > 1);
        let tokens_lead = outermost.is_none_or(|&axis| axis == Axis::Token);
        let mut tokens_per_block = input.inside.tokens_per_block;
        if tokens_lead && input.destination.order != InnerOrder::Packed {
            tokens_per_block = side_inside.tokens_per_block;
            counts[slot(Axis::Token)] = tokens_per_block;
        }
        let is_cut = |axis: Axis| match axis {
            Axis::Kv => atoms.iter().any(|atom| atom.kv != (0, counts[slot(Axis::Kv)])),
            Axis::Head => atoms.iter().any(|atom| atom.heads != (0, counts[slot(Axis::Head)])),
            Axis::Token => !side_inside.tokens_per_block.is_multiple_of(tokens_per_block),
            Axis::Dim => false,
        };
        let cut = (0..AXES).rev().find(|&position| is_cut(order[position]));
        if let Some(cut) = cut {
            for atom in &mut atoms {
                atom.piece = match order[cut] {
                    Axis::Kv => atom.kv.1 - atom.kv.0,
                    Axis::Head => atom.heads.1 - atom.heads.0,
                    Axis::Token => side_inside.tokens_per_block.min(tokens_per_block),
                    Axis::Dim => counts[slot(Axis::Dim)],
                };
                let mut piece = counts;
                piece[slot(order[cut])] = atom.piece;
                atom.nest = Nest::new(input.inside.element, &order, cut, &piece, &atom.strides);
            }
        }
        Ok(Shape {
            full: Nest::new(input.inside.element, &order, 0, &counts, &atoms[0].strides),
            order,
            counts,
            element: input.inside.element,
            unit_bytes,
            units: input.units,
            tokens_per_block,
            side_tokens_per_block: side_inside.tokens_per_block,
            side_first_block,
            side_group: side_class.group,
            atoms,
            cut,
            token_inside_cut: cut.is_some_and(|cut| order[cut + 1..].contains(&Axis::Token)),
            scattered: false,
        })
    }

    /// Notes how the side's blocks of the part (see [`side_blocks`](Self::side_blocks)) follow each other.
    pub(super) fn note_blocks(&mut self, blocks: &[BlockId]) {
        // Without a branch per block, so that it runs on whole vectors of them.
        let followed = blocks
            .windows(2)
            .fold(false, |any, pair| any | (pair[1] == pair[0].wrapping_add(1)));
        self.scattered = !followed;
    }

    /// Bytes of the plane in the part's stream.
    pub(super) fn bytes(&self) -> u64 {
        (self.units.end - self.units.start) * self.unit_bytes
    }

    /// The side's blocks that the part touches, as indices in its list.
    pub(super) fn side_blocks(&self) -> (u64, u64) {
        (
            (self.units.start / self.side_tokens_per_block).saturating_sub(self.side_first_block),
            self.units
                .end
                .div_ceil(self.side_tokens_per_block)
                .saturating_sub(self.side_first_block),
        )
    }

    /// Gives the plane's bytes to `sink`, from byte `skip` on. False when the sink wants no more.
    #[inline]
    pub(super) fn expand<S: Sink>(&self, sides: &[SidePlane], blocks: &[BlockId], skip: u64, sink: &mut S) -> bool {
        let (mut position, mut skip) = if skip == 0 {
            (self.units.start, 0)
        } else {
            self.seek(skip)
        };
        while position < self.units.end {
            let in_block = position % self.tokens_per_block;
            let same_blocks = self.cut.is_none() && self.tokens_per_block == self.side_tokens_per_block;
            if same_blocks && in_block == 0 && skip == 0 {
                let count = (self.units.end - position) / self.tokens_per_block;
                if count > 0 {
                    let first = (position / self.tokens_per_block - self.side_first_block) as usize;
                    if !self.expand_whole(&sides[0], &blocks[first..first + count as usize], sink) {
                        return false;
                    }
                    position += count * self.tokens_per_block;
                    continue;
                }
            }
            let end = (position - in_block + self.tokens_per_block).min(self.units.end);
            let more = match self.cut {
                Some(cut) => self.expand_cut(cut, sides, blocks, position, end, skip, sink),
                None => self.expand_uncut(&sides[0], blocks, position, end, skip, sink),
            };
            if !more {
                return false;
            }
            position = end;
            skip = 0;
        }
        true
    }

    /// Whole blocks that lie in whole blocks of the side: no arithmetic but a multiplication per block.
    #[inline]
    fn expand_whole<S: Sink>(&self, side: &SidePlane, blocks: &[BlockId], sink: &mut S) -> bool {
        let offset = self.atoms[0].offset;
        if self.full.depth == 0 {
            let apart = self.scattered || side.stride != self.full.row;
            return sink.put_blocks(side, offset, self.full.row, blocks, apart);
        }
        let base = side.base + offset;
        blocks
            .iter()
            .all(|&block| self.full.emit(side, base + u64::from(block) * side.stride, 0, sink))
    }

    /// One destination block (its units `position..end`) that lies in one block of the side.
    fn expand_uncut<S: Sink>(
        &self,
        side: &SidePlane,
        blocks: &[BlockId],
        position: u64,
        end: u64,
        skip: u64,
        sink: &mut S,
    ) -> bool {
        let base = self.place(side, &self.atoms[0], blocks, position);
        if end - position == self.tokens_per_block {
            return self.full.emit(side, base, skip, sink);
        }
        let mut counts = self.counts;
        counts[slot(Axis::Token)] = end - position;
        let nest = Nest::new(self.element, &self.order, 0, &counts, &self.atoms[0].strides);
        nest.emit(side, base, skip, sink)
    }

    /// The unit where the destination block with this byte begins (in the part), and how far into it the byte lies.
    fn seek(&self, skip: u64) -> (u64, u64) {
        let Units { start, end } = self.units;
        let first = (self.tokens_per_block - start % self.tokens_per_block).min(end - start);
        match skip.checked_sub(first * self.unit_bytes) {
            None => (start, skip),
            Some(past) => {
                let block_bytes = self.tokens_per_block * self.unit_bytes;
                (
                    start + first + past / block_bytes * self.tokens_per_block,
                    past % block_bytes,
                )
            }
        }
    }

    /// Where a unit of an atom lies in its region.
    fn place(&self, side: &SidePlane, atom: &Atom, blocks: &[BlockId], position: u64) -> u64 {
        let number = position / self.side_tokens_per_block - self.side_first_block;
        side.base
            + u64::from(blocks[number as usize]) * side.stride
            + atom.offset
            + position % self.side_tokens_per_block * atom.strides[slot(Axis::Token)]
    }

    /// One destination block (its units `start..end`) where the side is cut: axes outside the cut are walked one by
    /// one, the cut axis piece by piece, and what is inside is a nest.
    #[allow(clippy::too_many_arguments)] // One block of one plane has these coordinates.
    fn expand_cut<S: Sink>(
        &self,
        cut: usize,
        sides: &[SidePlane],
        blocks: &[BlockId],
        start: u64,
        end: u64,
        skip: u64,
        sink: &mut S,
    ) -> bool {
        let mut counts = self.counts;
        counts[slot(Axis::Token)] = end - start;
        let cut_axis = self.order[cut];
        let inner_bytes = self.order[cut + 1..]
            .iter()
            .fold(self.element, |bytes, &axis| bytes * counts[slot(axis)]);
        let cut_count = counts[slot(cut_axis)];
        let outer_count: u64 = self.order[..cut].iter().map(|&axis| counts[slot(axis)]).product();
        let full = end - start == self.tokens_per_block || !self.token_inside_cut;
        let (mut outer, mut inside) = (0, skip);
        if skip > 0 {
            outer = skip / (inner_bytes * cut_count);
            inside = skip % (inner_bytes * cut_count);
        }
        while outer < outer_count {
            let mut index = [0u64; AXES];
            let mut rest = outer;
            for &axis in self.order[..cut].iter().rev() {
                index[slot(axis)] = rest % counts[slot(axis)];
                rest /= counts[slot(axis)];
            }
            let mut along = 0;
            if inside > 0 {
                along = inside / inner_bytes;
                inside %= inner_bytes;
            }
            while along < cut_count {
                index[slot(cut_axis)] = along;
                let (number, atom) = self.atom_at(index[slot(Axis::Kv)], index[slot(Axis::Head)]);
                let position = start + index[slot(Axis::Token)];
                let piece_end = match cut_axis {
                    Axis::Kv => atom.kv.1,
                    Axis::Head => atom.heads.1,
                    Axis::Token => {
                        let left_in_block = self.side_tokens_per_block - position % self.side_tokens_per_block;
                        (along + left_in_block).min(cut_count)
                    }
                    Axis::Dim => cut_count,
                };
                let base = self.place(&sides[number], atom, blocks, position)
                    + (index[slot(Axis::Kv)] - atom.kv.0) * atom.strides[slot(Axis::Kv)]
                    + (index[slot(Axis::Head)] - atom.heads.0) * atom.strides[slot(Axis::Head)]
                    + index[slot(Axis::Dim)] * atom.strides[slot(Axis::Dim)];
                let more = if full && piece_end - along == atom.piece {
                    atom.nest.emit(&sides[number], base, inside, sink)
                } else {
                    let mut piece = counts;
                    piece[slot(cut_axis)] = piece_end - along;
                    let nest = Nest::new(self.element, &self.order, cut, &piece, &atom.strides);
                    nest.emit(&sides[number], base, inside, sink)
                };
                if !more {
                    return false;
                }
                inside = 0;
                along = piece_end;
            }
            outer += 1;
        }
        true
    }

    fn atom_at(&self, kv: u64, head: u64) -> (usize, &Atom) {
        let found = self
            .atoms
            .iter()
            .enumerate()
            .find(|(_, atom)| (atom.kv.0..atom.kv.1).contains(&kv) && (atom.heads.0..atom.heads.1).contains(&head));
        // `check_covered` has seen that the atoms cover each kv value and head.
        found.unwrap_or((0, &self.atoms[0]))
    }
}

/// What a plane of the side holds of the destination plane's moved heads.
fn atom(input: &ShapeInput<'_>, side: &PlaneClass, usable: Option<HeadRange>) -> Option<Atom> {
    let inside = Inside::of(input.side_layout, side);
    let (heads, mut offset) = match (input.heads, usable, side.heads) {
        (Some(moved), Some(usable), Some(held)) => {
            let common = moved.intersect(usable)?;
            (
                (
                    u64::from(common.start - moved.start),
                    u64::from(common.end - moved.start),
                ),
                u64::from(common.start - held.start) * inside.strides[slot(Axis::Head)],
            )
        }
        _ => ((0, 1), 0),
    };
    let kv = match (input.destination.kind, side.kind) {
        (PlaneKind::Fused, PlaneKind::Value) => (1, 2),
        (PlaneKind::Fused, PlaneKind::Fused) => (0, 2),
        (PlaneKind::Value, PlaneKind::Fused) => {
            offset += inside.strides[slot(Axis::Kv)];
            (0, 1)
        }
        _ => (0, 1),
    };
    // The destination's packed planes move as kv 0 whatever they hold.
    let kv = if input.destination.order == InnerOrder::Packed {
        (0, 1)
    } else {
        kv
    };
    Some(Atom {
        kv,
        heads,
        offset,
        strides: inside.strides,
        piece: 0,
        nest: Nest::NOTHING,
    })
}

/// Checks that the atoms hold each kv value and head.
fn check_covered(input: &ShapeInput<'_>, counts: &[u64; AXES], atoms: &[Atom]) -> Result<()> {
    let (kv_count, head_count) = (counts[slot(Axis::Kv)], counts[slot(Axis::Head)]);
    // The planes of one layer and kind are disjoint (validated), so the areas decide.
    let area: u64 = atoms
        .iter()
        .map(|atom| (atom.kv.1 - atom.kv.0) * (atom.heads.1 - atom.heads.0))
        .sum();
    if area == kv_count * head_count {
        return Ok(());
    }
    for kv in 0..kv_count {
        for head in 0..head_count {
            let holders = atoms
                .iter()
                .filter(|atom| (atom.kv.0..atom.kv.1).contains(&kv) && (atom.heads.0..atom.heads.1).contains(&head))
                .count();
            if holders == 1 {
                continue;
            }
            let kind = match (input.destination.kind, kv) {
                (PlaneKind::Fused, 0) => PlaneKind::Key,
                (PlaneKind::Fused, _) => PlaneKind::Value,
                (kind, _) => kind,
            };
            let head = input.heads.map_or(String::new(), |heads| {
                format!(" head {}", u64::from(heads.start) + head)
            });
            return Err(Error::new(ErrorKind::GeometryMismatch, format!("{kind}{head}"))
                .because(format!("the source has it {holders} times, once is needed"))
                .remedy("name all source ranks, or correct the declared heads"));
        }
    }
    Err(Error::new(ErrorKind::Internal, "source planes that overlap in heads"))
}

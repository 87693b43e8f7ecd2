//! Byte streams of parts: which planes follow each other, and the expansion of any range of them.

use std::sync::Arc;

use super::nest::{Piece, PieceSink, SegmentSink, SidePlane, Sink};
use super::pair::{LayerFinder, check_classes, matching_planes};
use super::shape::{Inside, Shape, ShapeInput, Units};
use super::{Scope, Target};
use crate::error::{Error, ErrorKind, Result};
use crate::flow::{ByteStream, PartExtent};
use crate::layout::{
    BlockId, GroupSelection, HeadRange, InnerOrder, PlaneClass, PlaneKind, PoolLayout, Selection, check_range,
    group_place,
};
use crate::memory::Segment;

/// One side of a part of a selection. Holds a few words per plane and nothing per block: block lists stay in the
/// target that it shares.
#[derive(Debug)]
pub(super) struct SelectionStream {
    /// One per destination plane, by first byte.
    entries: Vec<Entry>,
    shapes: Vec<Shape>,
    sides: Vec<SidePlane>,
    /// The side's own target, a selection.
    target: Arc<Target>,
    length: u64,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    start: u64,
    shape: u32,
    /// Its planes of this side: `sides[side..]`, as many as the shape has atoms.
    side: u32,
    plane: u32,
}

/// A destination's target as the planner reads it.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) layout: &'a PoolLayout,
    pub(super) selection: &'a Selection,
    pub(super) scope: &'a Scope,
    pub(super) extent: PartExtent,
}

/// What one plane of the destination gives to a part.
pub(super) struct WantedPlane {
    /// Among the planes of its layer.
    pub(super) ordinal: u32,
    pub(super) plane: u32,
    pub(super) class: u16,
    pub(super) heads: Option<HeadRange>,
    pub(super) units: Units,
}

impl Wanted<'_> {
    /// The layers of the part in stream order, after a check of everything but blocks.
    pub(super) fn layers(&self) -> Result<impl Iterator<Item = u16> + '_> {
        self.layout.check_group_count(self.selection)?;
        for (index, group) in self.selection.groups.iter().enumerate() {
            self.layout.check_shape(index, group)?;
        }
        self.scope.check_heads(self.layout)?;
        let count = self.scope.layer_count(self.layout);
        let end = usize::from(self.extent.layer_end).min(count);
        let start = usize::from(self.extent.layer_start).min(end);
        let known = self.layout.layers().len();
        if let Some(beyond) = (start..end)
            .map(|at| self.scope.layer(at))
            .find(|&layer| usize::from(layer) >= known)
        {
            return Err(Error::new(ErrorKind::OutOfBounds, format!("layer {beyond} of a scope"))
                .because(format!("the pool has {known} layers")));
        }
        Ok((start..end).map(|at| self.scope.layer(at)))
    }

    /// What each plane of a layer gives to the part, in stream order.
    pub(super) fn planes(&self, layer: u16) -> impl Iterator<Item = WantedPlane> + '_ {
        let planes = self.layout.layer_planes(layer).iter().enumerate();
        planes.filter_map(|(ordinal, &plane)| {
            let class = self.layout.plane_class(plane);
            let (heads, units) = self.share(self.layout.class(class))?;
            Some(WantedPlane {
                ordinal: ordinal as u32,
                plane,
                class,
                heads,
                units,
            })
        })
    }

    /// Heads and units that planes of this class give to the part; `None` if nothing.
    fn share(&self, class: &PlaneClass) -> Option<(Option<HeadRange>, Units)> {
        let group = usize::from(class.group);
        let heads = match class.heads {
            Some(held) => Some(
                self.scope
                    .heads_of(group)
                    .map_or(Some(held), |range| held.intersect(range))?,
            ),
            None => None,
        };
        let chosen = &self.selection.groups[group];
        let units = units(
            class,
            self.layout.cache_groups()[group].geometry.tokens_per_block,
            chosen,
            self.extent,
        );
        (units.start < units.end).then_some((heads, units))
    }
}

/// The tokens (of packed planes and states: the blocks) of a part.
fn units(class: &PlaneClass, tokens_per_block: u32, chosen: &GroupSelection, extent: PartExtent) -> Units {
    let (first, end) = (chosen.first_token, chosen.token_end);
    if class.kind == PlaneKind::State {
        return Units {
            start: 0,
            end: u64::from(extent.states && !chosen.is_empty()),
        };
    }
    if class.order != InnerOrder::Packed {
        return Units {
            start: u64::from(first.max(extent.token_start)),
            end: u64::from(end.min(extent.token_end)),
        };
    }
    // A packed block goes with the part that has its last selected token: only then is it whole.
    if extent.token_start >= end {
        return Units { start: 0, end: 0 };
    }
    Units {
        start: u64::from((first / tokens_per_block).max(extent.token_start / tokens_per_block)),
        end: u64::from(if extent.token_end >= end {
            end.div_ceil(tokens_per_block)
        } else {
            extent.token_end / tokens_per_block
        }),
    }
}

impl SelectionStream {
    /// The destination's own side.
    pub(super) fn of_destination(wanted: Wanted<'_>, target: &Arc<Target>) -> Result<SelectionStream> {
        let mut build = Build::new(wanted, wanted.layout, wanted.selection, target);
        for layer in wanted.layers()? {
            build.layer(layer, layer, |build, template| {
                for plane in wanted.planes(layer) {
                    let shape = build.shape(&plane, &[(plane.class, plane.heads)])?;
                    template.add(
                        &plane,
                        shape,
                        build.stream.shapes[shape as usize].bytes(),
                        [plane.ordinal],
                    );
                }
                Ok(())
            })?;
        }
        Ok(build.stream)
    }

    /// The source's side.
    pub(super) fn of_source(
        wanted: Wanted<'_>,
        source: &PoolLayout,
        selection: &Selection,
        scope: &Scope,
        target: &Arc<Target>,
    ) -> Result<SelectionStream> {
        source.check_group_count(selection)?;
        for (index, group) in selection.groups.iter().enumerate() {
            source.check_shape(index, group)?;
        }
        scope.check_heads(source)?;
        let mut build = Build::new(wanted, source, selection, target);
        let mut finder = LayerFinder::new(source);
        for layer in wanted.layers()? {
            // A layer that gives nothing to the part (no tokens of its group in it) need not be on the source.
            if wanted.planes(layer).next().is_none() {
                continue;
            }
            let source_layer = source_layer(&wanted, &mut finder, source, scope, layer)?;
            build.layer(layer, source_layer, |build, template| {
                let usable = scope.heads.as_deref();
                let mut found: Vec<(u32, Option<HeadRange>)> = Vec::new();
                for plane in wanted.planes(layer) {
                    found.clear();
                    matching_planes(
                        source,
                        source_layer,
                        usable,
                        wanted.layout,
                        plane.plane,
                        plane.heads,
                        &mut found,
                    )?;
                    let planes = source.layer_planes(source_layer);
                    let class = |ordinal: u32| source.plane_class(planes[ordinal as usize]);
                    let classes: Vec<_> = found.iter().map(|&(ordinal, heads)| (class(ordinal), heads)).collect();
                    build.check_source(&plane, &classes)?;
                    let shape = build.shape(&plane, &classes)?;
                    let bytes = build.stream.shapes[shape as usize].bytes();
                    template.add(&plane, shape, bytes, found.iter().map(|&(ordinal, _)| ordinal));
                }
                Ok(())
            })?;
        }
        Ok(build.stream)
    }

    /// Bytes of the part.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// Destination planes with bytes in the part.
    pub(super) fn plane_count(&self) -> usize {
        self.entries.len()
    }

    /// A destination plane and its first and last byte in the stream.
    pub(super) fn plane_range(&self, position: usize) -> (u32, u64, u64) {
        let entry = &self.entries[position];
        let end = self.entries.get(position + 1).map_or(self.length, |next| next.start);
        (entry.plane, entry.start, end)
    }

    /// Adds to `out` the pieces of `offset..offset + length`, until it holds `pieces_max`: the bytes covered. The range
    /// lies within one destination plane.
    pub(super) fn pieces(&self, offset: u64, length: u64, pieces_max: usize, out: &mut Vec<Piece>) -> u64 {
        let wanted = length.min(self.length.saturating_sub(offset));
        if wanted == 0 || out.len() >= pieces_max {
            return 0;
        }
        let mut sink = PieceSink {
            out,
            pieces_max,
            remaining: wanted,
        };
        self.expand(offset, &mut sink);
        wanted - sink.remaining
    }

    fn blocks(&self, group: u16) -> &[BlockId] {
        match &*self.target {
            Target::Selection { selection, .. } => &selection.groups[usize::from(group)].blocks,
            Target::Descriptors(_) => &[],
        }
    }

    #[inline]
    fn expand<S: Sink>(&self, offset: u64, sink: &mut S) {
        let first = self
            .entries
            .partition_point(|entry| entry.start <= offset)
            .saturating_sub(1);
        let mut skip = offset - self.entries[first].start;
        for entry in &self.entries[first..] {
            let shape = &self.shapes[entry.shape as usize];
            let blocks = self.blocks(shape.side_group);
            if !shape.expand(&self.sides[entry.side as usize..], blocks, skip, sink) {
                return;
            }
            skip = 0;
        }
    }
}

impl ByteStream for SelectionStream {
    fn length(&self) -> u64 {
        self.length
    }

    fn segments(&self, offset: u64, length: u64, segments_max: usize, out: &mut Vec<Segment>) -> u64 {
        let wanted = length.min(self.length.saturating_sub(offset));
        if wanted == 0 || out.len() >= segments_max {
            return 0;
        }
        let mut sink = SegmentSink::new(out, segments_max, wanted);
        self.expand(offset, &mut sink);
        sink.finish()
    }
}

/// The source's layer with the id of the destination's, if the source's scope has it.
fn source_layer(
    wanted: &Wanted<'_>,
    finder: &mut LayerFinder<'_>,
    source: &PoolLayout,
    scope: &Scope,
    layer: u16,
) -> Result<u16> {
    let id = &wanted.layout.layers()[usize::from(layer)];
    let found = finder.find(id);
    match found {
        Some(found) if scope.contains_layer(found) => Ok(found),
        _ => Err(Error::new(ErrorKind::GeometryMismatch, format!("layer {id}"))
            .because(match found {
                None => format!(
                    "the source has layers {}..{} ({} of them)",
                    source.layers()[0],
                    source.layers()[source.layers().len() - 1],
                    source.layers().len()
                ),
                Some(_) => "it is outside the scope of what the source sends".to_string(),
            })
            .remedy("grant only layers that the source has; layers match by id")),
    }
}

/// A stream being put together. Planes that look alike share a shape, and layers that look alike a template.
struct Build<'a> {
    wanted: Wanted<'a>,
    side_layout: &'a PoolLayout,
    side_selection: &'a Selection,
    keys: Vec<ShapeKey>,
    templates: Vec<Template>,
    /// Where to look first: the template after the one used last.
    next_template: usize,
    stream: SelectionStream,
}

struct ShapeKey {
    class: u16,
    side: Vec<(u16, Option<HeadRange>)>,
}

/// What a layer of these classes (the destination's and the side's) gives to the stream.
struct Template {
    classes: (u16, u16),
    entries: Vec<TemplateEntry>,
    /// The side's planes of all entries, by number among the planes of the side's layer.
    sides: Vec<u32>,
}

struct TemplateEntry {
    /// The destination's plane, by number among the planes of its layer.
    ordinal: u32,
    shape: u32,
    sides: u32,
    bytes: u64,
}

impl Template {
    fn add(&mut self, plane: &WantedPlane, shape: u32, bytes: u64, sides: impl IntoIterator<Item = u32>) {
        let before = self.sides.len();
        self.sides.extend(sides);
        self.entries.push(TemplateEntry {
            ordinal: plane.ordinal,
            shape,
            sides: (self.sides.len() - before) as u32,
            bytes,
        });
    }
}

impl<'a> Build<'a> {
    fn new(
        wanted: Wanted<'a>,
        side_layout: &'a PoolLayout,
        side_selection: &'a Selection,
        target: &Arc<Target>,
    ) -> Build<'a> {
        let layers = wanted.scope.layer_count(wanted.layout);
        let layers_in_part = usize::from(wanted.extent.layer_end)
            .min(layers)
            .saturating_sub(usize::from(wanted.extent.layer_start));
        let planes = wanted.layout.planes().len();
        // About as many planes as the part has layers; exact for models whose layers are all alike.
        let expected = (planes * layers_in_part)
            .div_ceil(wanted.layout.layers().len())
            .min(planes);
        Build {
            wanted,
            side_layout,
            side_selection,
            keys: Vec::new(),
            templates: Vec::new(),
            next_template: 0,
            stream: SelectionStream {
                entries: Vec::with_capacity(expected),
                shapes: Vec::new(),
                sides: Vec::with_capacity(expected),
                target: target.clone(),
                length: 0,
            },
        }
    }

    /// Adds a layer, by a template that is known or that `make` fills.
    fn layer(
        &mut self,
        layer: u16,
        side_layer: u16,
        make: impl FnOnce(&mut Self, &mut Template) -> Result<()>,
    ) -> Result<()> {
        let classes = (
            self.wanted.layout.layer_class(layer),
            self.side_layout.layer_class(side_layer),
        );
        let count = self.templates.len();
        let known = (0..count)
            .map(|step| (self.next_template + step) % count)
            .find(|&index| self.templates[index].classes == classes);
        let index = match known {
            Some(index) => index,
            None => {
                let mut template = Template {
                    classes,
                    entries: Vec::new(),
                    sides: Vec::new(),
                };
                make(self, &mut template)?;
                self.templates.push(template);
                count
            }
        };
        self.next_template = index + 1;
        let planes = self.wanted.layout.layer_planes(layer);
        let side_planes = self.side_layout.layer_planes(side_layer);
        let (template, stream) = (&self.templates[index], &mut self.stream);
        let mut sides = template.sides.iter();
        for entry in &template.entries {
            stream.entries.push(Entry {
                start: stream.length,
                shape: entry.shape,
                side: stream.sides.len() as u32,
                plane: planes[entry.ordinal as usize],
            });
            stream.length += entry.bytes;
            stream
                .sides
                .extend(sides.by_ref().take(entry.sides as usize).map(|&ordinal| {
                    let index = side_planes[ordinal as usize];
                    let plane = &self.side_layout.planes()[index as usize];
                    SidePlane {
                        plane: index,
                        region: plane.region,
                        base: plane.base,
                        stride: plane.stride,
                    }
                }));
        }
        Ok(())
    }

    /// The shape of a plane met with these classes of the side.
    fn shape(&mut self, plane: &WantedPlane, side: &[(u16, Option<HeadRange>)]) -> Result<u32> {
        let known = self
            .keys
            .iter()
            .position(|key| key.class == plane.class && key.side == side);
        if let Some(index) = known {
            return Ok(index as u32);
        }
        let group = usize::from(self.side_layout.class(side[0].0).group);
        let chosen = &self.side_selection.groups[group];
        let class = self.wanted.layout.class(plane.class);
        let mut shape = Shape::new(&ShapeInput {
            destination: class,
            inside: Inside::of(self.wanted.layout, class),
            heads: plane.heads,
            units: plane.units,
            side_layout: self.side_layout,
            side,
            side_first_token: chosen.first_token,
        })
        .map_err(|error| error.at(self.wanted.layout.plane_place(plane.plane as usize)))?;
        let (first, end) = shape.side_blocks();
        let group = &self.side_layout.cache_groups()[group];
        let touched = chosen.blocks.get(first as usize..end as usize).ok_or_else(|| {
            Error::new(ErrorKind::Internal, format!("blocks {first}..{end} of a selection"))
                .at(group_place(group))
                .because(format!("it has {}", chosen.blocks.len()))
        })?;
        check_range(group, touched)?;
        shape.note_blocks(touched);
        self.stream.shapes.push(shape);
        self.keys.push(ShapeKey {
            class: plane.class,
            side: side.to_vec(),
        });
        Ok((self.keys.len() - 1) as u32)
    }

    /// Checks that the source's planes mean the same and that its selection covers the part's tokens.
    fn check_source(&self, plane: &WantedPlane, side: &[(u16, Option<HeadRange>)]) -> Result<()> {
        let class = self.wanted.layout.class(plane.class);
        for &(have, _) in side {
            check_classes(
                self.side_layout,
                self.side_layout.class(have),
                self.wanted.layout,
                class,
            )?;
        }
        let side_class = self.side_layout.class(side[0].0);
        let have = &self.side_selection.groups[usize::from(side_class.group)];
        let group = &self.wanted.layout.cache_groups()[usize::from(class.group)];
        if class.kind == PlaneKind::State {
            if have.is_empty() {
                return Err(Error::new(ErrorKind::InvalidArgument, "the state block")
                    .at(group_place(group))
                    .because("the source selected none")
                    .remedy("append the state block to the offer before it is finished"));
            }
            return Ok(());
        }
        let chosen = &self.wanted.selection.groups[usize::from(class.group)];
        let (start, end) = if class.order == InnerOrder::Packed {
            let tokens = u64::from(group.geometry.tokens_per_block);
            (
                plane.units.start * tokens,
                (plane.units.end * tokens).min(u64::from(chosen.token_end)),
            )
        } else {
            (plane.units.start, plane.units.end)
        };
        let (have_start, have_end) = (u64::from(have.first_token), u64::from(have.token_end));
        if have_start <= start && end <= have_end {
            return Ok(());
        }
        // What is missing lies before the source's tokens, behind them, or both.
        let missing = match (start < have_start, end > have_end) {
            (true, false) => format!("{start}..{}", have_start.min(end)),
            (false, _) => format!("{}..{end}", have_end.max(start)),
            (true, true) => format!("{start}..{} and {}..{end}", have_start.min(end), have_end.max(start)),
        };
        Err(
            Error::new(ErrorKind::InvalidArgument, format!("destination tokens {missing}"))
                .at(group_place(group))
                .because(format!("no source covers them: it has tokens {have_start}..{have_end}"))
                .remedy("select only tokens that the source offers"),
        )
    }
}

/// Bytes of all planes of a part.
pub(super) fn part_bytes(wanted: Wanted<'_>) -> Result<u64> {
    let mut bytes = 0u64;
    let mut last: Option<(u16, u64)> = None;
    for layer in wanted.layers()? {
        let class = wanted.layout.layer_class(layer);
        let of_layer = match last {
            Some((known, of_layer)) if known == class => of_layer,
            _ => wanted
                .planes(layer)
                .map(|plane| plane_bytes(wanted.layout, &plane))
                .sum(),
        };
        last = Some((class, of_layer));
        bytes += of_layer;
    }
    Ok(bytes)
}

fn plane_bytes(layout: &PoolLayout, plane: &WantedPlane) -> u64 {
    let class = layout.class(plane.class);
    let held = u64::from(class.heads.map_or(1, HeadRange::count));
    let moved = u64::from(plane.heads.map_or(1, HeadRange::count));
    let unit = class.block_length / Inside::of(layout, class).tokens_per_block / held;
    unit * moved * (plane.units.end - plane.units.start)
}

//! A small world for planner tests: memory as byte arrays, and an oracle that copies element by element.
//!
//! The oracle knows nothing of streams: it computes addresses from planes with its own arithmetic, and what should lie
//! there from what the element *is* (layer, kind, head, token, element).
#![allow(dead_code)] // Each test binary uses its own part of it.

use std::sync::Arc;

use kvxfer_core::flow::{ByteStream, PartExtent};
use kvxfer_core::layout::*;
use kvxfer_core::memory::Segment;
use kvxfer_core::plan::{Plan, RunLimits, Scope, Target, assign, source_stream};

/// A pool with its memory.
#[derive(Clone)]
pub(crate) struct Pool {
    pub(crate) layout: Arc<PoolLayout>,
    pub(crate) memory: Vec<Vec<u8>>,
}

pub(crate) const POISON: u8 = 0xEE;

impl Pool {
    pub(crate) fn poisoned(layout: PoolLayout) -> Pool {
        let memory = layout
            .region_lengths()
            .iter()
            .map(|&length| vec![POISON; length as usize])
            .collect();
        Pool {
            layout: Arc::new(layout),
            memory,
        }
    }

    /// Writes what belongs into the selected blocks, element by element; where `layers` and `heads` say so.
    pub(crate) fn fill(&mut self, selection: &Selection, wanted: impl Fn(&str, usize, Option<u32>) -> bool) {
        let layout = self.layout.clone();
        for (index, plane) in layout.planes().iter().enumerate() {
            let layer = &layout.layers()[plane.layer as usize];
            let group = &layout.cache_groups()[plane.group as usize];
            let chosen = &selection.groups[plane.group as usize];
            if plane.kind == PlaneKind::State || plane.order == InnerOrder::Packed {
                self.fill_packed(index, plane, layer, group, chosen, &wanted);
                continue;
            }
            let kinds: &[PlaneKind] = match plane.kind {
                PlaneKind::Fused => &[PlaneKind::Key, PlaneKind::Value],
                PlaneKind::Key => &[PlaneKind::Key],
                PlaneKind::Value => &[PlaneKind::Value],
                _ => &[PlaneKind::Latent],
            };
            let heads = plane.heads.unwrap_or(HeadRange::new(0, 1));
            for token in chosen.first_token..chosen.token_end {
                for (kv, &kind) in kinds.iter().enumerate() {
                    let size = match kind {
                        PlaneKind::Value => group.geometry.value_head_size,
                        _ => group.geometry.head_size,
                    };
                    for head in heads.start..heads.end {
                        if !wanted(layer, plane.group as usize, plane.heads.map(|_| head)) {
                            continue;
                        }
                        for dim in 0..size {
                            let at = address(&layout, index, chosen, token, kv as u32, head - heads.start, dim);
                            let width = group.geometry.dtype.bytes();
                            for byte in 0..width {
                                let value = value(layer, ordinal(&layout, index), kind, head, token, dim, byte);
                                self.memory[plane.region as usize][(at + byte) as usize] = value;
                            }
                        }
                    }
                }
            }
        }
    }

    fn fill_packed(
        &mut self,
        index: usize,
        plane: &Plane,
        layer: &str,
        group: &CacheGroup,
        chosen: &GroupSelection,
        wanted: &impl Fn(&str, usize, Option<u32>) -> bool,
    ) {
        let heads = plane.heads.unwrap_or(HeadRange::new(0, 1));
        let per_head = plane.block_length / u64::from(heads.end - heads.start);
        let first = match group.geometry.tokens_per_block {
            0 => 0,
            tokens => chosen.first_token / tokens,
        };
        for (position, &block) in chosen.blocks.iter().enumerate() {
            for head in heads.start..heads.end {
                if !wanted(layer, plane.group as usize, plane.heads.map(|_| head)) {
                    continue;
                }
                let start = plane.base + u64::from(block) * plane.stride + u64::from(head - heads.start) * per_head;
                for byte in 0..per_head {
                    let number = first + position as u32;
                    let value = value(
                        layer,
                        ordinal(&self.layout, index),
                        plane.kind,
                        head,
                        number,
                        byte as u32,
                        7,
                    );
                    self.memory[plane.region as usize][(start + byte) as usize] = value;
                }
            }
        }
    }

    fn read(&self, segment: &Segment) -> &[u8] {
        let start = segment.offset as usize;
        &self.memory[segment.region as usize][start..start + segment.length as usize]
    }

    pub(crate) fn gather(&self, segments: &[Segment]) -> Vec<u8> {
        segments
            .iter()
            .flat_map(|segment| self.read(segment).iter().copied())
            .collect()
    }

    pub(crate) fn scatter(&mut self, segments: &[Segment], bytes: &[u8]) {
        let mut taken = 0;
        for segment in segments {
            let (start, length) = (segment.offset as usize, segment.length as usize);
            self.memory[segment.region as usize][start..start + length].copy_from_slice(&bytes[taken..taken + length]);
            taken += length;
        }
        assert_eq!(taken, bytes.len(), "source and destination stream differ in length");
    }
}

/// Which of its layer's planes of the same kind a head-less plane is.
fn ordinal(layout: &PoolLayout, index: usize) -> usize {
    let plane = &layout.planes()[index];
    if plane.heads.is_some() && plane.kind != PlaneKind::State {
        return 0;
    }
    layout.planes()[..index]
        .iter()
        .filter(|other| other.layer == plane.layer && other.kind == plane.kind)
        .count()
}

fn address(
    layout: &PoolLayout,
    index: usize,
    chosen: &GroupSelection,
    token: u32,
    kv: u32,
    head: u32,
    dim: u32,
) -> u64 {
    let plane = &layout.planes()[index];
    let geometry = &layout.cache_groups()[plane.group as usize].geometry;
    let tokens = geometry.tokens_per_block;
    let block = chosen.blocks[(token / tokens - chosen.first_token / tokens) as usize];
    let mut element = 0u64;
    for axis in plane.order.axes() {
        let (size, at) = match axis {
            Axis::Kv => (2, kv),
            Axis::Head => (plane.heads.unwrap().end - plane.heads.unwrap().start, head),
            Axis::Token => (tokens, token % tokens),
            Axis::Dim if plane.kind == PlaneKind::Value => (geometry.value_head_size, dim),
            Axis::Dim => (geometry.head_size, dim),
        };
        element = element * u64::from(size) + u64::from(at);
    }
    plane.base + u64::from(block) * plane.stride + element * geometry.dtype.bytes()
}

/// The byte that belongs there. Never the poison.
fn value(layer: &str, ordinal: usize, kind: PlaneKind, head: u32, token: u32, dim: u32, byte: u64) -> u8 {
    let mut hash = 0x9e37_79b9_7f4a_7c15u64;
    let mut mix = |number: u64| {
        hash = (hash ^ number).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash ^= hash >> 29;
    };
    layer.bytes().for_each(|letter| mix(u64::from(letter)));
    mix(ordinal as u64);
    mix(kind as u64);
    mix(u64::from(head) << 32 | u64::from(token));
    mix(u64::from(dim) << 8 | byte);
    (hash % 0xEE) as u8
}

/// All segments of a stream.
pub(crate) fn all(stream: &dyn ByteStream) -> Vec<Segment> {
    let mut out = Vec::new();
    let covered = stream.segments(0, u64::MAX, usize::MAX, &mut out);
    assert_eq!(covered, stream.length());
    assert_eq!(out.iter().map(|segment| segment.length).sum::<u64>(), covered);
    for pair in out.windows(2) {
        assert!(
            pair[0].region != pair[1].region || pair[0].offset + pair[0].length != pair[1].offset,
            "adjacent segments were not merged"
        );
    }
    out
}

pub(crate) fn target(selection: &Selection, scope: &Scope) -> Arc<Target> {
    Arc::new(Target::Selection {
        selection: selection.clone(),
        scope: scope.clone(),
    })
}

/// Hands over from all sources into the destination, part by part, and compares every byte of its memory with what
/// the oracle puts there. `parts` gives the extents for a scope of so many layers. Returns the number of bytes moved.
pub(crate) fn hand_over(
    sources: &[(Pool, Selection)],
    destination: &mut Pool,
    selection: &Selection,
    parts: impl Fn(u16) -> Vec<PartExtent>,
) -> u64 {
    let layouts: Vec<&PoolLayout> = sources.iter().map(|(pool, _)| &*pool.layout).collect();
    let scopes = assign(&layouts, &destination.layout).unwrap();
    let mut expected = destination.clone();
    expected.fill(selection, |_, _, _| true);
    let mut moved = 0;
    for ((pool, have), scope) in sources.iter().zip(scopes) {
        let Some(scope) = scope else { continue };
        scope.check(&destination.layout).unwrap();
        let have = target(have, &Scope::EVERYTHING);
        let wanted = target(selection, &scope);
        let mut of_this_source = 0;
        for extent in parts(scope.layers.len() as u16) {
            let from = source_stream(&pool.layout, &have, &destination.layout, &wanted, extent).unwrap();
            let to = wanted.stream(&destination.layout, extent).unwrap();
            assert_eq!(from.length(), to.length());
            assert_eq!(wanted.part_bytes(&destination.layout, extent).unwrap(), to.length());
            let bytes = pool.gather(&all(&*from));
            destination.scatter(&all(&*to), &bytes);
            check_plan(pool, &have, destination, &wanted, extent, &bytes);
            of_this_source += to.length();
        }
        assert_eq!(of_this_source, wanted.bytes(&destination.layout).unwrap());
        moved += of_this_source;
    }
    for (region, (have, want)) in destination.memory.iter().zip(&expected.memory).enumerate() {
        if let Some(at) = have.iter().zip(want).position(|(have, want)| have != want) {
            panic!(
                "byte {at} of region {region} is {:#x}, should be {:#x}",
                have[at], want[at]
            );
        }
    }
    let whole = target(selection, &Scope::EVERYTHING)
        .bytes(&destination.layout)
        .unwrap();
    assert_eq!(moved, whole, "each byte is sent once");
    moved
}

/// The runs of the plan must name the same bytes as the streams, and cross no edge.
fn check_plan(
    source: &Pool,
    have: &Arc<Target>,
    destination: &Pool,
    wanted: &Arc<Target>,
    extent: PartExtent,
    bytes: &[u8],
) {
    let plan = Plan::new(&source.layout, have, &destination.layout, wanted, extent).unwrap();
    for limits in [
        RunLimits::default(),
        RunLimits {
            source_registration_max: Some(24),
            destination_registration_max: Some(17),
        },
    ] {
        let mut position = 0u64;
        for run in plan.runs(limits) {
            assert_eq!(run.stream_offset, position);
            let from = &source.layout.planes()[run.source_plane as usize];
            let to = &destination.layout.planes()[run.destination_plane as usize];
            let mut edges = Vec::new();
            for piece in 0..run.count {
                let at = |base: u64, offset: u64, stride: i64| {
                    (base + offset).wrapping_add_signed(stride * piece as i64) as usize
                };
                let length = run.length as usize;
                let from_at = at(from.base, run.source_offset, run.source_stride);
                let to_at = at(to.base, run.destination_offset, run.destination_stride);
                let have = &source.memory[from.region as usize][from_at..from_at + length];
                let placed = &destination.memory[to.region as usize][to_at..to_at + length];
                assert_eq!(have, &bytes[position as usize..position as usize + length]);
                assert_eq!(have, placed);
                for (at, max) in [
                    (from_at, limits.source_registration_max),
                    (to_at, limits.destination_registration_max),
                ] {
                    if let Some(max) = max {
                        edges.push((max, at as u64 / max));
                        edges.push((max, (at + length - 1) as u64 / max));
                    }
                }
                position += run.length;
            }
            for (max, number) in &edges {
                let same = edges.iter().filter(|edge| edge.0 == *max);
                assert!(
                    same.clone().all(|edge| edge.1 == *number),
                    "a run crosses a registration"
                );
            }
        }
        assert_eq!(position, plan.bytes());
    }
}

/// Distinct blocks in an order that follows from the seed.
pub(crate) fn shuffled(count: u32, pool: u32, seed: u64) -> Vec<BlockId> {
    let mut blocks: Vec<BlockId> = (0..pool).collect();
    let mut state = seed | 1;
    for index in (1..blocks.len()).rev() {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        blocks.swap(index, (state >> 33) as usize % (index + 1));
    }
    blocks.truncate(count as usize);
    blocks
}

/// A selection of one group's tokens in shuffled blocks.
pub(crate) fn tokens(layout: &PoolLayout, group: usize, first: u32, end: u32, seed: u64) -> GroupSelection {
    let group = &layout.cache_groups()[group];
    let per_block = group.geometry.tokens_per_block;
    if per_block == 0 {
        return GroupSelection::state(shuffled(1, group.blocks, seed)[0]);
    }
    let count = if first == end {
        0
    } else {
        end.div_ceil(per_block) - first / per_block
    };
    GroupSelection {
        first_token: first,
        token_end: end,
        blocks: shuffled(count, group.blocks, seed),
    }
}

/// The same tokens in every group.
pub(crate) fn select(layout: &PoolLayout, first: u32, end: u32, seed: u64) -> Selection {
    Selection {
        groups: (0..layout.groups())
            .map(|group| tokens(layout, group, first, end, seed + group as u64))
            .collect(),
    }
}

/// One part with everything.
pub(crate) fn whole(_layers: u16) -> Vec<PartExtent> {
    vec![PartExtent::WHOLE]
}

/// Parts of every pair of token and layer ranges between these cuts; states go with the last tokens.
pub(crate) fn grid(token_cuts: &[u32], layer_cuts: &[u16], layers: u16) -> Vec<PartExtent> {
    let mut token_cuts = token_cuts.to_vec();
    token_cuts.extend([0, u32::MAX]);
    token_cuts.sort_unstable();
    token_cuts.dedup();
    let mut layer_cuts: Vec<u16> = layer_cuts.iter().copied().filter(|&cut| cut < layers).collect();
    layer_cuts.extend([0, layers]);
    layer_cuts.sort_unstable();
    layer_cuts.dedup();
    let mut parts = Vec::new();
    for tokens in token_cuts.windows(2) {
        for layers in layer_cuts.windows(2) {
            parts.push(PartExtent {
                token_start: tokens[0],
                token_end: tokens[1],
                layer_start: layers[0],
                layer_end: layers[1],
                states: tokens[1] == u32::MAX,
            });
        }
    }
    parts
}

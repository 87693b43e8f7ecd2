//! The planner against the oracle, over random geometries, selections, ranks and parts, byte for byte.
#![allow(clippy::unwrap_used)] // Helpers outside test functions unwrap too.

mod plan_world;

use std::sync::Arc;

use kvxfer_core::flow::{ByteStream, PartExtent};
use kvxfer_core::layout::*;
use kvxfer_core::memory::Segment;
use kvxfer_core::plan::{Scope, Target, assign, source_stream};
use plan_world::*;
use proptest::prelude::*;

/// What both sides must agree on.
#[derive(Debug, Clone)]
struct Model {
    dtype: DType,
    layers: u32,
    kv_heads: u32,
    head_size: u32,
    value_head_size: u32,
    /// Packed planes, with the bytes of one head's block following from equal tokens per block.
    packed: bool,
    latent: bool,
    state: bool,
}

/// How one side lays it out.
#[derive(Debug, Clone)]
struct Side {
    ranks: u32,
    tokens_per_block: u32,
    arrangement: u32,
    key_order: u32,
    value_order: u32,
    latent_order: u32,
    gap: u64,
    seed: u64,
}

const BLOCKS: u32 = 26;

fn permutation<const N: usize>(mut axes: [Axis; N], mut number: u32) -> [Axis; N] {
    for index in (1..N).rev() {
        axes.swap(index, number as usize % (index + 1));
        number /= index as u32 + 1;
    }
    axes
}

fn single(number: u32) -> InnerOrder {
    // The two usual orders half of the time.
    match number % 4 {
        0 => InnerOrder::NHD,
        1 => InnerOrder::HND,
        _ => InnerOrder::Single(permutation([Axis::Head, Axis::Token, Axis::Dim], number / 4)),
    }
}

fn fused(number: u32) -> InnerOrder {
    match number % 4 {
        0 => InnerOrder::KV_NHD,
        1 => InnerOrder::KV_HND,
        _ => InnerOrder::Fused(permutation([Axis::Kv, Axis::Head, Axis::Token, Axis::Dim], number / 4)),
    }
}

impl Side {
    /// The layout of one rank, with these layers.
    fn layout(&self, model: &Model, rank: u32, layers: impl Fn(u32) -> bool) -> PoolLayout {
        let mut builder = PoolLayout::builder();
        let sharding = Sharding::Heads {
            rank: rank as u16,
            size: self.ranks as u16,
        };
        let geometry = Geometry::attention(
            model.dtype,
            self.tokens_per_block,
            model.kv_heads,
            model.head_size,
            sharding,
        )
        .with_value_head_size(model.value_head_size);
        let local = sharding.local_heads(model.kv_heads).unwrap();
        let group = builder.group("attention", geometry, BLOCKS);
        let mut planes = Vec::new();
        for layer in (0..model.layers).filter(|&layer| layers(layer)) {
            let name = format!("layer.{layer}");
            let plane = |kind| PlaneSpec::new(group, &name, kind);
            let split = |kind, number: u32| {
                let order = if model.packed {
                    InnerOrder::Packed
                } else {
                    single(number)
                };
                plane(kind).order(order)
            };
            let can_fuse = model.head_size == model.value_head_size || model.packed;
            match self.arrangement % 4 {
                1 if can_fuse => planes.push(plane(PlaneKind::Fused).order(if model.packed {
                    InnerOrder::Packed
                } else {
                    fused(self.key_order)
                })),
                2 => {
                    for (kind, order) in [(PlaneKind::Key, self.key_order), (PlaneKind::Value, self.value_order)] {
                        for head in local.start..local.end {
                            planes.push(split(kind, order).heads(head..head + 1));
                        }
                    }
                }
                _ => {
                    planes.push(split(PlaneKind::Key, self.key_order));
                    planes.push(split(PlaneKind::Value, self.value_order));
                }
            }
        }
        if model.latent {
            let sharding = Sharding::Replicated {
                rank: rank as u16,
                size: self.ranks as u16,
            };
            let geometry = Geometry::latent(DType::U8, self.tokens_per_block, 3, sharding);
            let group = builder.group("latent", geometry, BLOCKS);
            let order = match self.latent_order % 2 {
                0 => InnerOrder::ROWS,
                _ => InnerOrder::Latent([Axis::Dim, Axis::Token]),
            };
            for layer in (0..model.layers).filter(|&layer| layers(layer)) {
                planes.push(PlaneSpec::new(group, format!("latent.{layer}"), PlaneKind::Latent).order(order));
            }
        }
        if model.state {
            let group = builder.group("state", Geometry::state(model.kv_heads, sharding), BLOCKS);
            let length = u64::from(local.end - local.start) * 5;
            // In the attention's own layer, twice.
            let first = (0..model.layers).find(|&layer| layers(layer)).unwrap();
            for _ in 0..2 {
                let plane = PlaneSpec::new(group, format!("layer.{first}"), PlaneKind::State);
                planes.push(plane.block_length(length));
            }
        }
        self.place(&mut builder, planes);
        builder.build().unwrap()
    }

    /// Gives the planes their places: block-major in one big block with gaps, or one after another in two regions.
    fn place(&self, builder: &mut LayoutBuilder, planes: Vec<PlaneSpec>) {
        // Lengths are found by building each plane alone in a copy of the builder.
        let length = |plane: &PlaneSpec| {
            let mut alone = builder.clone();
            alone.plane(plane.clone().region(0).base(0));
            alone.build().map(|layout| layout.planes()[0].block_length)
        };
        if self.arrangement.is_multiple_of(2) || self.arrangement % 4 == 1 {
            for (index, plane) in planes.into_iter().enumerate() {
                builder.plane(plane.region(index as u32 % 2));
            }
            return;
        }
        let lengths: Vec<u64> = planes.iter().map(|plane| length(plane).unwrap()).collect();
        let stride = lengths.iter().sum::<u64>() + self.gap;
        let mut base = self.gap / 2;
        for (plane, length) in planes.into_iter().zip(lengths) {
            builder.plane(plane.base(base).stride(stride));
            base += length;
        }
        builder.region(0, base + stride * u64::from(BLOCKS));
    }
}

fn any_model() -> impl Strategy<Value = Model> {
    (
        prop::sample::select(vec![DType::U8, DType::Bf16, DType::F32]),
        1u32..4,
        prop::sample::select(vec![1u32, 2, 4, 8]),
        1u32..4,
        1u32..4,
        (0u32..6, any::<bool>(), any::<bool>(), any::<bool>()),
    )
        .prop_map(
            |(dtype, layers, kv_heads, head_size, value, (packed, latent, state, equal))| Model {
                dtype,
                layers,
                kv_heads,
                head_size,
                value_head_size: if equal { head_size } else { value },
                packed: packed == 0,
                latent,
                state,
            },
        )
}

fn any_side() -> impl Strategy<Value = Side> {
    (
        prop::sample::select(vec![1u32, 2, 4, 8]),
        prop::sample::select(vec![1u32, 2, 3, 4, 8]),
        0u32..4,
        (0u32..96, 0u32..24, 0u32..2),
        0u64..9,
        any::<u64>(),
    )
        .prop_map(
            |(ranks, tokens_per_block, arrangement, (key_order, value_order, latent_order), gap, seed)| Side {
                ranks,
                tokens_per_block,
                arrangement,
                key_order,
                value_order,
                latent_order,
                gap,
                seed: seed >> 1,
            },
        )
}

#[derive(Debug, Clone)]
struct Case {
    model: Model,
    source: Side,
    destination: Side,
    /// Source tokens and the destination's inside them.
    tokens: (u32, u32, u32, u32),
    token_cuts: Vec<u32>,
    layer_cuts: Vec<u16>,
    /// The destination has only layers whose bit is set.
    layer_mask: u32,
    /// The source's layers are spread over two pipeline stages.
    stages: bool,
}

fn any_case() -> impl Strategy<Value = Case> {
    (
        any_model(),
        any_side(),
        any_side(),
        [0u32..20, 0u32..20, 0u32..20, 0u32..20],
        prop::collection::vec(0u32..20, 0..3),
        prop::collection::vec(0u16..8, 0..3),
        1u32..8,
        any::<bool>(),
    )
        .prop_map(
            |(model, source, mut destination, mut tokens, token_cuts, layer_cuts, layer_mask, stages)| {
                tokens.sort_unstable();
                let [mut first, mut from, to, end] = tokens;
                let mut source = source;
                if model.packed {
                    destination.tokens_per_block = source.tokens_per_block;
                    first -= first % source.tokens_per_block;
                    from -= from % source.tokens_per_block;
                    // Packed fused blocks only go to packed fused blocks, packed K to packed K.
                    if (source.arrangement == 1) != (destination.arrangement == 1) {
                        source.arrangement = destination.arrangement;
                    }
                }
                Case {
                    model,
                    source,
                    destination,
                    tokens: (first, from, to, end),
                    token_cuts,
                    layer_cuts,
                    layer_mask,
                    stages,
                }
            },
        )
}

impl Case {
    fn destination_layers(&self) -> impl Fn(u32) -> bool + use<> {
        let any = (0..self.model.layers).any(|layer| self.layer_mask >> layer & 1 == 1);
        let mask = if any { self.layer_mask } else { u32::MAX };
        move |layer| mask >> layer & 1 == 1
    }

    /// The states are in the first layer of each pool, which must then be the same one on both sides.
    fn model(&self) -> Model {
        let mut model = self.model.clone();
        let layers = self.destination_layers();
        model.state &= layers(0);
        model
    }

    fn sources(&self) -> Vec<(Pool, Selection)> {
        let model = self.model();
        let stages = if self.stages && model.layers > 1 { 2 } else { 1 };
        let mut sources = Vec::new();
        for stage in 0..stages {
            for rank in 0..self.source.ranks {
                let last = stage + 1 == stages;
                let mut model = model.clone();
                // States only in the first stage.
                model.state &= stage == 0;
                let layout = self.source.layout(
                    &model,
                    rank,
                    |layer| {
                        if stage == 0 { layer == 0 || last } else { layer > 0 }
                    },
                );
                let mut pool = Pool::poisoned(layout);
                let seed = self.source.seed.wrapping_add(u64::from(rank) * 77);
                let selection = select(&pool.layout, self.tokens.0, self.tokens.3, seed);
                pool.fill(&selection, |_, _, _| true);
                sources.push((pool, selection));
            }
        }
        sources
    }

    fn destination(&self, rank: u32) -> (Pool, Selection) {
        let layout = self.destination.layout(&self.model(), rank, self.destination_layers());
        let pool = Pool::poisoned(layout);
        let seed = self.destination.seed.wrapping_add(u64::from(rank) * 131);
        let selection = select(&pool.layout, self.tokens.1, self.tokens.2, seed);
        (pool, selection)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn streams_copy_what_the_oracle_copies(case in any_case()) {
        let sources = case.sources();
        for rank in 0..case.destination.ranks {
            let (mut pool, selection) = case.destination(rank);
            hand_over(&sources, &mut pool, &selection, |layers| {
                grid(&case.token_cuts, &case.layer_cuts, layers)
            });
        }
    }

    #[test]
    fn any_ranges_of_a_stream_concatenate_to_it(
        case in any_case(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 1..6),
        segments_max in 1usize..9,
    ) {
        let sources = case.sources();
        let (pool, selection) = case.destination(0);
        let layouts: Vec<&PoolLayout> = sources.iter().map(|(pool, _)| &*pool.layout).collect();
        let scopes = assign(&layouts, &pool.layout).unwrap();
        for ((source, have), scope) in sources.iter().zip(scopes) {
            let Some(scope) = scope else { continue };
            let have = target(have, &Scope::EVERYTHING);
            let wanted = target(&selection, &scope);
            let extent = PartExtent::WHOLE;
            let streams = [
                source_stream(&source.layout, &have, &pool.layout, &wanted, extent).unwrap(),
                wanted.stream(&pool.layout, extent).unwrap(),
            ];
            for stream in streams {
                check_ranges(&*stream, &cuts, segments_max);
            }
        }
    }
}

/// Expands a stream range by range, a few segments at a time: the same bytes in the same order as all at once.
fn check_ranges(stream: &dyn ByteStream, cuts: &[prop::sample::Index], segments_max: usize) {
    let all = all(stream);
    let length = stream.length();
    let mut offsets: Vec<u64> = cuts.iter().map(|cut| cut.index(length as usize + 1) as u64).collect();
    offsets.extend([0, length]);
    offsets.sort_unstable();
    let mut joined: Vec<Segment> = Vec::new();
    for range in offsets.windows(2) {
        let mut position = range[0];
        while position < range[1] {
            let mut out = vec![
                Segment {
                    region: 9,
                    offset: 0,
                    length: 1
                };
                2
            ];
            let covered = stream.segments(position, range[1] - position, segments_max + 2, &mut out);
            assert!(covered > 0 && position + covered <= range[1]);
            assert!(out.len() <= segments_max + 2);
            assert_eq!(out[2..].iter().map(|segment| segment.length).sum::<u64>(), covered);
            assert!(
                position + covered == range[1] || out.len() == segments_max + 2,
                "stopped without need"
            );
            for segment in &out[2..] {
                match joined.last_mut() {
                    Some(last) if last.region == segment.region && last.offset + last.length == segment.offset => {
                        last.length += segment.length;
                    }
                    _ => joined.push(*segment),
                }
            }
            position += covered;
        }
    }
    assert_eq!(joined, all);
    let mut out = Vec::new();
    assert_eq!(stream.segments(length, 1, 10, &mut out), 0);
    assert_eq!(stream.segments(0, 0, 10, &mut out), 0);
    assert_eq!(stream.segments(0, 10, 0, &mut out), 0);
    assert!(out.is_empty());
}

/// The oracle itself must see a wrong byte: a comparison that cannot fail would prove nothing.
#[test]
#[should_panic(expected = "of region 0 is")]
fn the_comparison_sees_one_wrong_byte() {
    let model = kvxfer_core::layout::Model::preset("qwen3-8b").unwrap();
    let layout = model
        .layout_of_layers(0, 8, 2, 6, Arrangement::PER_LAYER_NHD, |layer| layer < 2)
        .unwrap();
    let mut source = Pool::poisoned(layout.clone());
    let have = select(&source.layout, 0, 5, 3);
    source.fill(&have, |_, _, _| true);
    let at = {
        let block = have.groups[0].blocks[1];
        source.layout.plane_offset(2, block).unwrap().1 as usize
    };
    source.memory[0][at] ^= 1;
    let mut destination = Pool::poisoned(layout);
    let want = select(&destination.layout, 0, 5, 4);
    hand_over(&[(source, have)], &mut destination, &want, whole);
}

#[test]
fn a_target_crosses_the_wire() {
    let layout = Arc::new(PoolLayout::opaque(8, 10).unwrap());
    let wanted: Target = Selection::whole_blocks(1, vec![3, 4, 9]).into();
    assert_eq!(wanted.bytes(&layout).unwrap(), 24);
    let bytes = postcard::to_stdvec(&wanted).unwrap();
    assert_eq!(postcard::from_bytes::<Target>(&bytes).unwrap(), wanted);
    let segments = all(&*Arc::new(wanted).stream(&layout, PartExtent::WHOLE).unwrap());
    assert_eq!(segments.len(), 2);
    assert_eq!((segments[0].offset, segments[0].length), (24, 16));
}

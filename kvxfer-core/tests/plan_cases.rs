//! The planner's named cases, each against the oracle.
#![allow(clippy::unwrap_used)] // Helpers outside test functions unwrap too.

mod plan_world;

use std::sync::Arc;

use kvxfer_core::flow::PartExtent;
use kvxfer_core::layout::*;
use kvxfer_core::plan::{Plan, RunLimits, Scope, Target, assign, source_stream};
use plan_world::*;

const HND: Arrangement = Arrangement::PER_LAYER_HND;
const NHD: Arrangement = Arrangement::PER_LAYER_NHD;

fn arrangement(planes: PlaneArrangement, order: HeadOrder) -> Arrangement {
    Arrangement { planes, order }
}

/// A small model: three layers, eight kv heads of four elements.
fn model(kv_heads: u32) -> Model {
    let text = format!(
        "[[model]]\nname = \"small\"\ndtype = \"bf16\"\n[[model.group]]\nname = \"attention\"\nkind = \"attention\"\n\
         layers = [{{ first = 0, end = 3 }}]\nkv_heads = {kv_heads}\nhead_size = 4\n"
    );
    Model::from_toml(&text).unwrap().remove(0)
}

fn filled(layout: PoolLayout, first: u32, end: u32, seed: u64) -> (Pool, Selection) {
    let mut pool = Pool::poisoned(layout);
    let selection = select(&pool.layout, first, end, seed);
    pool.fill(&selection, |_, _, _| true);
    (pool, selection)
}

fn ranks(
    model: &Model,
    size: u16,
    tokens_per_block: u32,
    how: Arrangement,
    first: u32,
    end: u32,
) -> Vec<(Pool, Selection)> {
    (0..size)
        .map(|rank| {
            let layout = model.layout(rank, size, tokens_per_block, 40, how).unwrap();
            filled(layout, first, end, 900 + u64::from(rank))
        })
        .collect()
}

/// Hands tokens 0..150 of all source ranks to each destination rank, whole and in parts.
fn between(model: &Model, source: (u16, u32, Arrangement), destination: (u16, u32, Arrangement)) {
    let sources = ranks(model, source.0, source.1, source.2, 0, 150);
    for rank in 0..destination.0 {
        for parts in [&whole as &dyn Fn(u16) -> Vec<PartExtent>, &|layers| {
            grid(&[16, 50, 64], &[1], layers)
        }] {
            let layout = model
                .layout(rank, destination.0, destination.1, 40, destination.2)
                .unwrap();
            let mut pool = Pool::poisoned(layout);
            let selection = select(&pool.layout, 0, 150, u64::from(rank));
            hand_over(&sources, &mut pool, &selection, parts);
        }
    }
}

#[test]
fn tensor_parallel_sizes_may_differ() {
    for (source, destination) in [(4, 8), (4, 2), (8, 1), (1, 8), (2, 2)] {
        for how in [NHD, HND] {
            between(&model(8), (source, 16, how), (destination, 16, how));
        }
    }
}

#[test]
fn replicated_heads_are_sent_once_and_replicas_take_turns() {
    between(&model(2), (8, 16, NHD), (4, 16, NHD));
    between(&model(2), (4, 16, NHD), (8, 16, HND));
    between(&model(1), (4, 16, NHD), (2, 16, NHD));
    let model = model(2);
    let sources: Vec<PoolLayout> = (0..8).map(|rank| model.layout(rank, 8, 16, 4, NHD).unwrap()).collect();
    let sources: Vec<&PoolLayout> = sources.iter().collect();
    let mut senders: Vec<usize> = (0..8)
        .map(|rank| {
            let scopes = assign(&sources, &model.layout(rank, 8, 16, 4, NHD).unwrap()).unwrap();
            let sending: Vec<usize> = (0..8).filter(|&source| scopes[source].is_some()).collect();
            assert_eq!(sending.len(), 1);
            sending[0]
        })
        .collect();
    senders.sort_unstable();
    assert_eq!(senders, (0..8).collect::<Vec<_>>(), "each replica serves one rank");
}

#[test]
fn heads_and_tokens_may_be_ordered_differently() {
    between(&model(8), (2, 16, NHD), (2, 16, HND));
    between(&model(8), (4, 16, HND), (8, 16, NHD));
}

#[test]
fn tokens_per_block_may_differ() {
    for (source, destination) in [(16, 32), (32, 16), (16, 64), (64, 16), (48, 32)] {
        for (from, to) in [(NHD, NHD), (HND, HND), (NHD, HND), (HND, NHD)] {
            between(&model(8), (2, source, from), (4, destination, to));
        }
    }
}

#[test]
fn planes_may_be_arranged_differently() {
    use HeadOrder::*;
    use PlaneArrangement::*;
    for from in [PerLayer, Fused, BlockMajor, PerHead] {
        for to in [PerLayer, Fused, BlockMajor, PerHead] {
            between(
                &model(4),
                (2, 16, arrangement(from, Nhd)),
                (2, 16, arrangement(to, Hnd)),
            );
            between(
                &model(4),
                (1, 16, arrangement(from, Hnd)),
                (2, 32, arrangement(to, Nhd)),
            );
        }
    }
}

#[test]
fn a_partial_last_block_stays_untouched_behind_its_tokens() {
    let model = model(8);
    let sources = ranks(&model, 1, 16, NHD, 0, 37);
    let mut pool = Pool::poisoned(model.layout(0, 1, 32, 4, NHD).unwrap());
    let selection = Selection::single(0, 37, vec![2, 0]);
    hand_over(&sources, &mut pool, &selection, whole);
    let (region, start) = pool.layout.plane_offset(0, 0).unwrap();
    let token = 8 * 4 * 2;
    let block = &pool.memory[region as usize][start as usize..start as usize + 32 * token];
    assert!(block[..5 * token].iter().all(|&byte| byte != POISON));
    assert!(block[5 * token..].iter().all(|&byte| byte == POISON));
}

#[test]
fn a_held_prefix_is_neither_sent_nor_overwritten() {
    let model = model(8);
    let sources = ranks(&model, 2, 16, NHD, 0, 80);
    for (first, tokens_per_block) in [(32, 16), (37, 16), (64, 64), (79, 64)] {
        let mut pool = Pool::poisoned(model.layout(0, 4, tokens_per_block, 8, NHD).unwrap());
        let selection = select(&pool.layout, first, 80, 5);
        let bytes = hand_over(&sources, &mut pool, &selection, |layers| grid(&[64], &[2], layers));
        assert_eq!(bytes, u64::from(80 - first) * 3 * 2 * 2 * 4 * 2);
    }
    // A source may itself have only the tail.
    let sources = ranks(&model, 2, 16, NHD, 30, 80);
    let mut pool = Pool::poisoned(model.layout(0, 4, 16, 8, NHD).unwrap());
    let selection = select(&pool.layout, 41, 80, 5);
    hand_over(&sources, &mut pool, &selection, whole);
}

#[test]
fn layers_match_by_id() {
    let model = model(4);
    let stage = |layers: &'static [u16]| move |layer: u16| layers.contains(&layer);
    // Two pipeline stages of two ranks each, to one endpoint with all layers and one with the last two.
    let mut sources = Vec::new();
    for layers in [&[0u16, 1][..], &[2]] {
        for rank in 0..2 {
            let layout = model.layout_of_layers(rank, 2, 16, 8, NHD, stage(layers)).unwrap();
            sources.push(filled(layout, 0, 40, 3));
        }
    }
    for layers in [&[0u16, 1, 2][..], &[1, 2], &[2]] {
        let layout = model.layout_of_layers(0, 1, 16, 8, HND, stage(layers)).unwrap();
        let mut pool = Pool::poisoned(layout);
        let selection = select(&pool.layout, 0, 40, 8);
        hand_over(&sources, &mut pool, &selection, |layers| grid(&[16], &[1], layers));
    }
    // A draft model's layers beside the main ones: other ids, none of them sent.
    let layouts: Vec<&PoolLayout> = sources.iter().map(|source| &*source.0.layout).collect();
    let last = model.layout_of_layers(0, 1, 16, 8, NHD, stage(&[2])).unwrap();
    let scopes = assign(&layouts, &last).unwrap();
    assert!(scopes[0].is_none() && scopes[1].is_none());
    assert_eq!(scopes[2].as_ref().unwrap().layers, [0]);
    assert_eq!(scopes[3].as_ref().unwrap().heads, Some(vec![HeadRange::new(2, 4)]));
}

#[test]
fn latent_rows_come_from_one_replica() {
    let model = Model::preset("deepseek-v3").unwrap();
    let small = |rank, size, tokens| {
        model
            .layout_of_layers(rank, size, tokens, 6, NHD, |layer| layer < 2)
            .unwrap()
    };
    let sources: Vec<(Pool, Selection)> = (0..4).map(|rank| filled(small(rank, 4, 16), 0, 40, 2)).collect();
    let layouts: Vec<&PoolLayout> = sources.iter().map(|source| &*source.0.layout).collect();
    for rank in 0..4 {
        let mut pool = Pool::poisoned(small(rank, 4, 64));
        let scopes = assign(&layouts, &pool.layout).unwrap();
        let sending: Vec<usize> = (0..4).filter(|&source| scopes[source].is_some()).collect();
        assert_eq!(sending, [usize::from(rank)]);
        let selection = select(&pool.layout, 0, 40, 9);
        let bytes = hand_over(&sources, &mut pool, &selection, whole);
        assert_eq!(bytes, 2 * 40 * 576 * 2);
    }
}

/// Packed pools as vLLM's CPU cache has them: per head K transposed, then V.
fn packed(rank: u16, size: u16, tokens_per_block: u32) -> PoolLayout {
    let mut builder = PoolLayout::builder();
    let sharding = Sharding::Heads { rank, size };
    let geometry = Geometry::attention(DType::Bf16, tokens_per_block, 4, 4, sharding);
    let group = builder.group("packed", geometry, 8);
    for layer in ["a", "b"] {
        builder.plane(PlaneSpec::new(group, layer, PlaneKind::Fused).order(InnerOrder::Packed));
    }
    builder.build().unwrap()
}

#[test]
fn packed_planes_move_whole_blocks_and_split_by_head() {
    for (from, to) in [(2, 4), (4, 1), (2, 2)] {
        let sources: Vec<(Pool, Selection)> = (0..from).map(|rank| filled(packed(rank, from, 8), 0, 29, 4)).collect();
        for rank in 0..to {
            for first in [0, 8] {
                let mut pool = Pool::poisoned(packed(rank, to, 8));
                let selection = select(&pool.layout, first, 29, 6);
                let blocks = selection.groups[0].blocks.len() as u64;
                // Parts that end inside blocks: a block goes with the part that has its last token.
                let bytes = hand_over(&sources, &mut pool, &selection, |layers| {
                    grid(&[3, 8, 13, 17, 26], &[1], layers)
                });
                assert_eq!(bytes, blocks * 2 * u64::from(4 / to) * 8 * 8 * 2);
            }
        }
    }
}

/// An attention layer, and one whose state is kept once per request, divided among ranks or not.
fn hybrid(rank: u16, size: u16, tokens_per_block: u32, state_first: bool) -> PoolLayout {
    let mut builder = PoolLayout::builder();
    let sharding = Sharding::Heads { rank, size };
    let attention = Geometry::attention(DType::F16, tokens_per_block, 2, 4, sharding);
    let replicated = Sharding::Replicated { rank, size };
    let groups: [(&str, Geometry); 3] = [
        ("attention", attention),
        ("state", Geometry::state(8, sharding)),
        ("conv", Geometry::state(0, replicated)),
    ];
    let order: [usize; 3] = if state_first { [2, 1, 0] } else { [0, 1, 2] };
    let mut numbers = [0u16; 3];
    for index in order {
        numbers[index] = builder.group(groups[index].0, groups[index].1, 6);
    }
    builder.plane(PlaneSpec::new(numbers[0], "0", PlaneKind::Key));
    builder.plane(PlaneSpec::new(numbers[0], "0", PlaneKind::Value));
    let local = u64::from(8 / size);
    builder.plane(PlaneSpec::new(numbers[1], "1", PlaneKind::State).block_length(12 * local));
    builder.plane(PlaneSpec::new(numbers[2], "1.conv", PlaneKind::State).block_length(10));
    builder.build().unwrap()
}

#[test]
fn state_blocks_and_groups_of_different_heads_go_together() {
    // Two attention heads over four ranks are replicated, eight state heads are not: one scope holds both.
    for (from, to) in [(4, 4), (2, 4), (4, 2), (4, 1)] {
        let sources: Vec<(Pool, Selection)> = (0..from)
            .map(|rank| filled(hybrid(rank, from, 4, false), 0, 11, 1))
            .collect();
        for rank in 0..to {
            let mut pool = Pool::poisoned(hybrid(rank, to, 8, true));
            let selection = select(&pool.layout, 0, 11, 7);
            hand_over(&sources, &mut pool, &selection, |layers| grid(&[4], &[1, 2], layers));
        }
    }
}

#[test]
fn a_state_that_is_not_selected_is_not_moved() {
    let sources = vec![filled(hybrid(0, 1, 4, false), 0, 11, 1)];
    let mut pool = Pool::poisoned(hybrid(0, 1, 4, false));
    let mut selection = select(&pool.layout, 0, 11, 7);
    selection.groups[1] = GroupSelection::default();
    let bytes = hand_over(&sources, &mut pool, &selection, whole);
    assert_eq!(bytes, 11 * 2 * 2 * 4 * 2 + 10);
}

#[test]
fn sliding_windows_need_only_their_tails() {
    let model = Model::preset("gemma-3-27b").unwrap();
    let layout = |rank, size, tokens| {
        let layout = model.layout_of_layers(rank, size, tokens, 40, Arrangement::BLOCK_MAJOR_NHD, |layer| {
            (4..7).contains(&layer)
        });
        layout.unwrap()
    };
    // The source has dropped what lies before the window, and the destination wants less still.
    let sources: Vec<(Pool, Selection)> = (0..2)
        .map(|rank| {
            let mut pool = Pool::poisoned(layout(rank, 2, 4));
            let selection = Selection {
                groups: vec![tokens(&pool.layout, 0, 0, 90, 1), tokens(&pool.layout, 1, 50, 90, 2)],
            };
            pool.fill(&selection, |_, _, _| true);
            (pool, selection)
        })
        .collect();
    let mut pool = Pool::poisoned(layout(1, 4, 8));
    let selection = Selection {
        groups: vec![tokens(&pool.layout, 0, 16, 90, 3), tokens(&pool.layout, 1, 58, 90, 4)],
    };
    let bytes = hand_over(&sources, &mut pool, &selection, |layers| {
        grid(&[48, 70], &[1, 2], layers)
    });
    let token = 2 * 4 * 128 * 2;
    assert_eq!(bytes, (74 + 2 * 32) * token);
}

#[test]
fn contiguous_blocks_collapse_to_one_run_per_plane() {
    let model = model(8);
    let layout = Arc::new(model.layout(0, 4, 16, 40, NHD).unwrap());
    let have = target(&Selection::single(0, 128, (8..16).collect()), &Scope::EVERYTHING);
    let wanted = target(&Selection::single(0, 128, (20..28).collect()), &Scope::EVERYTHING);
    let plan = Plan::new(&layout, &have, &layout, &wanted, PartExtent::WHOLE).unwrap();
    let runs: Vec<_> = plan.runs(RunLimits::default()).collect();
    assert_eq!(runs.len(), 6);
    assert!(
        runs.iter()
            .all(|run| run.count == 1 && run.length == 8 * 16 * 2 * 4 * 2)
    );
    assert!(plan.to_string().contains("plane 5 (V of layer 2)"), "{plan}");
    // Evenly spread blocks are one strided run per plane too.
    let spread = target(
        &Selection::single(0, 128, (0..8).map(|block| block * 3).collect()),
        &Scope::EVERYTHING,
    );
    let plan = Plan::new(&layout, &spread, &layout, &wanted, PartExtent::WHOLE).unwrap();
    let runs: Vec<_> = plan.runs(RunLimits::default()).collect();
    assert_eq!(runs.len(), 6);
    assert_eq!(
        (runs[0].count, runs[0].source_stride, runs[0].destination_stride),
        (8, 3 * 256, 256)
    );
}

#[test]
fn a_block_major_pool_moves_its_big_blocks_in_one_piece_where_orders_allow() {
    // K and V of the three layers lie in one block: a selected block is contiguous across planes, and segments merge.
    let model = model(8);
    let layout = Arc::new(model.layout(0, 4, 16, 40, Arrangement::BLOCK_MAJOR_NHD).unwrap());
    let wanted = target(&Selection::single(0, 16, vec![7]), &Scope::EVERYTHING);
    let segments = all(&*wanted.stream(&layout, PartExtent::WHOLE).unwrap());
    assert_eq!(segments.len(), 1);
    assert_eq!(segments[0].length, 6 * 16 * 2 * 4 * 2);
}

#[test]
fn groups_may_share_their_memory() {
    let mut builder = PoolLayout::builder();
    let geometry = |heads| Geometry::attention(DType::U8, 4, heads, 4, Sharding::NONE);
    // Two groups with blocks of 64 bytes, cut from the same memory.
    let full = builder.group("full", geometry(2), 10);
    let sliding = builder.group("sliding", geometry(2), 10);
    for (group, layer) in [(full, "0"), (sliding, "1")] {
        builder.plane(PlaneSpec::new(group, layer, PlaneKind::Key).base(0).stride(64));
        builder.plane(PlaneSpec::new(group, layer, PlaneKind::Value).base(32).stride(64));
    }
    assert!(builder.build().unwrap_err().to_string().contains("shared_blocks"));
    builder.shared_blocks();
    let layout = builder.build().unwrap();
    let mut source = Pool::poisoned(layout.clone());
    let group = |first, end, blocks: &[u32]| GroupSelection {
        first_token: first,
        token_end: end,
        blocks: blocks.to_vec(),
    };
    let have = Selection {
        groups: vec![group(0, 11, &[1, 4, 2]), group(4, 11, &[7, 0])],
    };
    source.fill(&have, |_, _, _| true);
    let mut pool = Pool::poisoned(layout.clone());
    let want = Selection {
        groups: vec![group(0, 11, &[9, 8, 3]), group(4, 11, &[2, 6])],
    };
    hand_over(&[(source, have)], &mut pool, &want, |layers| grid(&[8], &[1], layers));
    let twice = Selection {
        groups: vec![group(0, 11, &[9, 8, 3]), group(4, 11, &[2, 8])],
    };
    assert!(
        layout
            .check(&twice)
            .unwrap_err()
            .to_string()
            .contains("block 8 is selected twice")
    );
}

#[test]
fn descriptors_are_copied_in_list_order() {
    let layout = Arc::new(PoolLayout::opaque(16, 8).unwrap());
    let piece = |block, offset, length| BlockDescriptor {
        plane: 0,
        block,
        offset,
        length,
    };
    let wanted: Arc<Target> = Arc::new(vec![piece(5, 4, 4), piece(1, 0, 16), piece(2, 0, 8)].into());
    assert_eq!(wanted.bytes(&layout).unwrap(), 28);
    let segments = all(&*wanted.stream(&layout, PartExtent::WHOLE).unwrap());
    let places: Vec<(u64, u64)> = segments
        .iter()
        .map(|segment| (segment.offset, segment.length))
        .collect();
    assert_eq!(places, [(84, 4), (16, 24)]);
    let mut out = Vec::new();
    let stream = wanted.stream(&layout, PartExtent::WHOLE).unwrap();
    assert_eq!(stream.segments(2, 5, 8, &mut out), 5);
    assert_eq!(out.iter().map(|segment| segment.offset).collect::<Vec<_>>(), [86, 16]);
    // From a selection of as many bytes, in the source's own order.
    let short = Arc::new(PoolLayout::opaque(14, 8).unwrap());
    let have: Arc<Target> = Arc::new(Selection::whole_blocks(1, vec![3, 1]).into());
    let from = source_stream(&short, &have, &layout, &wanted, PartExtent::WHOLE).unwrap();
    assert_eq!(all(&*from)[0].offset, 42);
    assert_eq!(from.length(), 28);
}

#[test]
fn appends_go_on_where_the_last_one_ended() {
    let layout = model(8).layout(0, 4, 16, 40, NHD).unwrap();
    let mut selection = Selection::default();
    layout
        .append(&mut selection, &Selection::single(0, 20, vec![4, 9]))
        .unwrap();
    layout
        .append(&mut selection, &Selection::single(20, 50, vec![9, 1, 2]))
        .unwrap();
    layout
        .append(&mut selection, &Selection::single(50, 64, vec![2]))
        .unwrap();
    layout
        .append(&mut selection, &Selection::single(64, 65, vec![3]))
        .unwrap();
    assert_eq!(selection, Selection::single(0, 65, vec![4, 9, 1, 2, 3]));
    for (more, why) in [
        (Selection::single(66, 70, vec![3]), "end at 65"),
        (Selection::single(65, 70, vec![8]), "half-full block 3"),
        (Selection::single(65, 90, vec![3, 9]), "selected twice"),
    ] {
        let before = selection.clone();
        let error = layout.append(&mut selection, &more).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(selection, before);
    }
}

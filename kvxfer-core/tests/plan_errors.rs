//! Wrong layouts, selections and pairs: each a typed error that names what is wrong.
#![allow(clippy::unwrap_used)] // Helpers outside test functions unwrap too.

use std::sync::Arc;

use kvxfer_core::flow::PartExtent;
use kvxfer_core::layout::*;
use kvxfer_core::plan::{Plan, Scope, Target, assign, source_stream};
use kvxfer_core::{Error, ErrorKind};

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Error>, kind: ErrorKind, words: &[&str]) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{word:?} is missing in: {error}");
    }
}

fn geometry() -> Geometry {
    Geometry::attention(DType::Bf16, 16, 8, 4, Sharding::Heads { rank: 1, size: 2 })
}

/// A layout of one layer, with its K plane changed.
fn with_key(geometry: Geometry, change: impl Fn(PlaneSpec) -> PlaneSpec) -> Result<PoolLayout, Error> {
    let mut builder = PoolLayout::builder();
    let group = builder.group("attention", geometry, 10);
    builder.plane(change(PlaneSpec::new(group, "0", PlaneKind::Key)));
    builder.plane(PlaneSpec::new(group, "0", PlaneKind::Value));
    builder.build()
}

use ErrorKind::{GeometryMismatch, InvalidArgument, OutOfBounds, Unsupported};

#[test]
fn a_plane_must_fit_its_geometry() {
    let bad = |change: fn(PlaneSpec) -> PlaneSpec| with_key(geometry(), change);
    refused(
        bad(|plane| plane.block_length(500)),
        InvalidArgument,
        &[
            "K block of 500 bytes",
            "16 tokens x 4 heads x 4 elements of bf16 make 512 bytes",
            "layer 0",
        ],
    );
    refused(
        bad(|plane| plane.stride(511)),
        InvalidArgument,
        &["stride of 511", "512 bytes"],
    );
    refused(
        bad(|plane| plane.heads(0..4)),
        OutOfBounds,
        &["heads 0..4", "this rank holds heads 4..8"],
    );
    refused(
        bad(|plane| plane.heads(4..6)),
        InvalidArgument,
        &["heads 6..8 of the K planes missing"],
    );
    refused(
        bad(|plane| plane.order(InnerOrder::ROWS)),
        InvalidArgument,
        &["inner order token,dim of a K plane"],
    );
    refused(
        bad(|plane| plane.order(InnerOrder::Single([Axis::Token, Axis::Token, Axis::Dim]))),
        InvalidArgument,
        &["inner order token,token,dim"],
    );
    refused(
        bad(|plane| plane.base(u64::MAX - 9)),
        OutOfBounds,
        &["plane 0 (K of layer 0)", "overflows"],
    );
}

#[test]
fn a_plane_must_lie_in_its_region_and_apart_from_others() {
    let mut builder = PoolLayout::builder();
    let group = builder.group("attention", geometry(), 10);
    builder.plane(PlaneSpec::new(group, "0", PlaneKind::Key));
    builder.plane(PlaneSpec::new(group, "0", PlaneKind::Value).base(5119));
    refused(
        builder.build(),
        InvalidArgument,
        &["plane 0 (K of layer 0) overlaps plane 1 (V of layer 0)", "region 0"],
    );
    let mut builder = PoolLayout::builder();
    let group = builder.group("attention", geometry(), 10);
    builder.plane(PlaneSpec::new(group, "0", PlaneKind::Key).region(1));
    builder.plane(PlaneSpec::new(group, "0", PlaneKind::Value));
    builder.region(1, 5119);
    refused(
        builder.build(),
        OutOfBounds,
        &["10 blocks of 512 bytes", "they end at 5120, region 1 has 5119 bytes"],
    );
    // Interleaved with the right stride, and one byte too near.
    let interleaved = |base| {
        let mut builder = PoolLayout::builder();
        let group = builder.group("attention", geometry(), 10);
        builder.plane(PlaneSpec::new(group, "0", PlaneKind::Key).base(0).stride(1024));
        builder.plane(PlaneSpec::new(group, "0", PlaneKind::Value).base(base).stride(1024));
        builder.build()
    };
    assert!(interleaved(512).is_ok());
    refused(interleaved(511), InvalidArgument, &["overlaps"]);
    refused(interleaved(513), InvalidArgument, &["overlaps"]);
}

#[test]
fn a_group_must_make_sense() {
    let same = |plane: PlaneSpec| plane;
    let with = |change: fn(&mut Geometry)| {
        let mut changed = geometry();
        change(&mut changed);
        with_key(changed, same)
    };
    refused(
        with(|geometry| geometry.sharding = Sharding::Tokens { rank: 0, size: 2 }),
        Unsupported,
        &["sharding by tokens"],
    );
    refused(
        with(|geometry| geometry.sharding = Sharding::Heads { rank: 2, size: 2 }),
        InvalidArgument,
        &["rank 2 of 2"],
    );
    refused(
        with(|geometry| geometry.sharding = Sharding::Heads { rank: 0, size: 3 }),
        InvalidArgument,
        &["8 kv heads over 3 ranks"],
    );
    refused(
        with(|geometry| geometry.head_size = 0),
        InvalidArgument,
        &["head size of 0"],
    );
    refused(
        with(|geometry| geometry.tokens_per_block = 0),
        InvalidArgument,
        &["0 tokens per block"],
    );
    refused(
        with(|geometry| geometry.kv_heads = 0),
        InvalidArgument,
        &["head-less cache sharded by heads"],
    );
    refused(
        with(|geometry| geometry.kv_heads = 1 << 20),
        InvalidArgument,
        &["1048576 kv heads"],
    );
    refused(PoolLayout::builder().build(), InvalidArgument, &["without planes"]);
    refused(PoolLayout::opaque(0, 4), InvalidArgument, &["head size of 0"]);
    refused(PoolLayout::opaque(4, 0), InvalidArgument, &["0 blocks"]);
    refused(PoolLayout::opaque(u32::MAX, u32::MAX), InvalidArgument, &["region 0"]);
    let mut builder = PoolLayout::builder();
    let unequal = builder.group("attention", geometry().with_value_head_size(8), 10);
    builder.plane(PlaneSpec::new(unequal, "0", PlaneKind::Fused));
    refused(builder.build(), InvalidArgument, &["unequal head sizes"]);
    let mut builder = PoolLayout::builder();
    let group = builder.group("attention", geometry(), 10);
    builder.plane(PlaneSpec::new(group, "0", PlaneKind::Latent));
    refused(builder.build(), InvalidArgument, &["a latent plane", "8 kv heads"]);
    let mut builder = PoolLayout::builder();
    builder.plane(PlaneSpec::new(3, "0", PlaneKind::Key));
    refused(builder.build(), OutOfBounds, &["cache group 3"]);
    let mut builder = PoolLayout::builder();
    let group = builder.group("attention", geometry(), 10);
    builder.plane(PlaneSpec::new(group, "a".repeat(200), PlaneKind::Key));
    refused(builder.build(), InvalidArgument, &["layer id of 200 bytes"]);
}

#[test]
fn a_layout_is_validated_again_when_it_is_read() {
    let layout = with_key(geometry(), |plane| plane).unwrap();
    let bytes = postcard::to_stdvec(&layout).unwrap();
    assert_eq!(postcard::from_bytes::<PoolLayout>(&bytes).unwrap(), layout);
    // Any single changed byte gives a valid layout or an error, never a panic; most give errors.
    let mut errors = 0;
    for at in 0..bytes.len() {
        for flip in [1u8, 0x10, 0x80] {
            let mut forged = bytes.clone();
            forged[at] ^= flip;
            match postcard::from_bytes::<PoolLayout>(&forged) {
                Err(_) => errors += 1,
                Ok(read) => {
                    assert!(read.planes().iter().all(|plane| plane.block_length > 0));
                }
            }
        }
    }
    assert!(
        errors > bytes.len(),
        "only {errors} of {} forgeries refused",
        bytes.len() * 3
    );
    for cut in 0..bytes.len() {
        assert!(postcard::from_bytes::<PoolLayout>(&bytes[..cut]).is_err());
    }
}

#[test]
fn equal_declarations_have_equal_hashes_wherever_they_lie() {
    let hash = |geometry, region, base| {
        with_key(geometry, move |plane| plane.region(region).base(base))
            .unwrap()
            .geometry_hash()
    };
    assert_eq!(hash(geometry(), 0, 0), hash(geometry(), 1, 4096));
    let mut other = geometry();
    other.dtype = DType::F16;
    assert_ne!(hash(geometry(), 0, 0), hash(other, 0, 0));
    let transposed = with_key(geometry(), |plane| plane.order(InnerOrder::HND)).unwrap();
    assert_ne!(hash(geometry(), 0, 0), transposed.geometry_hash());
}

#[test]
fn a_selection_must_hold_exactly_its_tokens() {
    let layout = with_key(geometry(), |plane| plane).unwrap();
    let check = |first, end, blocks: &[u32]| layout.check(&Selection::single(first, end, blocks.to_vec()));
    assert!(check(0, 40, &[9, 0, 4]).is_ok());
    assert!(check(17, 40, &[9, 0]).is_ok());
    assert!(check(5, 5, &[]).is_ok());
    refused(
        check(0, 40, &[9, 0]),
        InvalidArgument,
        &["2 blocks for tokens 0..40", "lie in 3 blocks"],
    );
    refused(
        check(0, 48, &[9, 0, 4, 1]),
        InvalidArgument,
        &["4 blocks for tokens 0..48"],
    );
    refused(
        check(0, 40, &[9, 0, 9]),
        InvalidArgument,
        &["block 9 is selected twice"],
    );
    refused(
        check(0, 40, &[9, 10, 4]),
        OutOfBounds,
        &["block 10", "the group has 10 blocks", "below 10"],
    );
    refused(check(4, 3, &[]), InvalidArgument, &["tokens 4..3"]);
    refused(
        layout.check(&Selection { groups: vec![] }),
        InvalidArgument,
        &["selection of 0 cache groups", "the pool has 1"],
    );
    let scope = |layers: &[u16], heads| Scope {
        layers: layers.to_vec(),
        heads,
    };
    refused(
        scope(&[0, 1], None).check(&layout),
        OutOfBounds,
        &["layer 1 of a scope"],
    );
    refused(scope(&[0, 0], None).check(&layout), InvalidArgument, &["ascending"]);
    refused(
        scope(&[0], Some(vec![])).check(&layout),
        InvalidArgument,
        &["0 head ranges"],
    );
}

#[test]
fn packed_selections_begin_with_whole_blocks() {
    let packed = |plane: PlaneSpec| plane.order(InnerOrder::Packed);
    let mut builder = PoolLayout::builder();
    let group = builder.group("attention", geometry(), 10);
    builder.plane(packed(PlaneSpec::new(group, "0", PlaneKind::Fused)));
    let layout = builder.build().unwrap();
    refused(
        layout.check(&Selection::single(3, 20, vec![0, 1])),
        InvalidArgument,
        &["starts at token 3", "whole blocks"],
    );
}

#[test]
fn descriptors_must_lie_in_their_blocks_and_apart() {
    let layout = PoolLayout::opaque(16, 8).unwrap();
    let piece = |plane, block, offset, length| BlockDescriptor {
        plane,
        block,
        offset,
        length,
    };
    let check = |pieces: &[BlockDescriptor]| Target::Descriptors(pieces.to_vec()).bytes(&layout);
    refused(check(&[piece(1, 0, 0, 1)]), OutOfBounds, &["plane 1"]);
    refused(check(&[piece(0, 8, 0, 1)]), OutOfBounds, &["block 8"]);
    refused(
        check(&[piece(0, 7, 10, 7)]),
        OutOfBounds,
        &["7 bytes at offset 10", "16 bytes"],
    );
    refused(
        check(&[piece(0, 7, u32::MAX, u32::MAX)]),
        OutOfBounds,
        &["a block has 16 bytes"],
    );
    refused(
        check(&[piece(0, 1, 0, 5), piece(0, 2, 0, 5), piece(0, 1, 4, 2)]),
        InvalidArgument,
        &["descriptors 0 and 2 overlap"],
    );
    let target = Arc::new(Target::Descriptors(vec![piece(0, 1, 0, 5)]));
    let layout = Arc::new(layout);
    let part = PartExtent {
        token_end: 4,
        ..PartExtent::WHOLE
    };
    refused(
        target.stream(&layout, part),
        InvalidArgument,
        &["part of explicit descriptors"],
    );
    let other = Arc::new(Target::Descriptors(vec![piece(0, 1, 0, 6)]));
    refused(
        source_stream(&layout, &other, &layout, &target, PartExtent::WHOLE),
        InvalidArgument,
        &["source of 6 bytes", "the destination has 5"],
    );
    refused(
        Plan::new(&layout, &other, &layout, &target, PartExtent::WHOLE),
        InvalidArgument,
        &["plan of explicit descriptors"],
    );
}

/// One layer with these blocks of tokens selected.
fn one(geometry: Geometry, order: InnerOrder, first: u32, end: u32) -> (Arc<PoolLayout>, Arc<Target>) {
    let mut builder = PoolLayout::builder();
    let group = builder.group("attention", geometry, 10);
    builder.plane(PlaneSpec::new(group, "7", PlaneKind::Key).order(order));
    builder.plane(PlaneSpec::new(group, "7", PlaneKind::Value).order(order));
    let blocks = (0..end.div_ceil(geometry.tokens_per_block) - first / geometry.tokens_per_block).collect();
    let layout = builder.build().unwrap();
    (Arc::new(layout), Arc::new(Selection::single(first, end, blocks).into()))
}

#[test]
fn uncovered_tokens_are_named() {
    let wanted = one(geometry(), InnerOrder::NHD, 16, 100);
    let stream = |first, end, extent| {
        let have = one(geometry(), InnerOrder::NHD, first, end);
        source_stream(&have.0, &have.1, &wanted.0, &wanted.1, extent)
    };
    let whole = PartExtent::WHOLE;
    refused(
        stream(0, 90, whole),
        InvalidArgument,
        &[
            "destination tokens 90..100",
            "cache group attention",
            "it has tokens 0..90",
        ],
    );
    refused(stream(40, 100, whole), InvalidArgument, &["destination tokens 16..40"]);
    refused(
        stream(40, 90, whole),
        InvalidArgument,
        &["destination tokens 16..40 and 90..100"],
    );
    refused(stream(0, 5, whole), InvalidArgument, &["destination tokens 16..100"]);
    // A part that needs only what is there is fine.
    let part = PartExtent {
        token_start: 40,
        token_end: 90,
        ..whole
    };
    assert_eq!(stream(40, 90, part).unwrap().length(), 50 * 2 * 4 * 4 * 2);
}

#[test]
fn mismatches_name_the_field() {
    let wanted = one(geometry(), InnerOrder::NHD, 0, 40);
    let pair = |change: fn(&mut Geometry), order: InnerOrder, words: &[&str]| {
        let mut changed = geometry();
        change(&mut changed);
        let have = one(changed, order, 0, 40);
        refused(
            source_stream(&have.0, &have.1, &wanted.0, &wanted.1, PartExtent::WHOLE),
            GeometryMismatch,
            words,
        );
        refused(assign(&[&have.0], &wanted.0), GeometryMismatch, words);
    };
    let same = |_: &mut Geometry| {};
    pair(
        |have| have.dtype = DType::F16,
        InnerOrder::NHD,
        &["dtype: source has f16, destination has bf16"],
    );
    pair(
        |have| have.head_size = 8,
        InnerOrder::NHD,
        &["head size: source has 8, destination has 4"],
    );
    pair(
        |have| have.value_head_size = 8,
        InnerOrder::NHD,
        &["value head size: source has 8"],
    );
    pair(
        |have| have.kv_heads = 4,
        InnerOrder::NHD,
        &["kv heads: source has 4, destination has 8"],
    );
    pair(
        same,
        InnerOrder::Packed,
        &["inner order: source has packed, destination has token,head,dim"],
    );
    let packed = one(geometry(), InnerOrder::Packed, 0, 40);
    let mut larger = geometry();
    larger.tokens_per_block = 32;
    let have = one(larger, InnerOrder::Packed, 0, 40);
    refused(
        source_stream(&have.0, &have.1, &packed.0, &packed.1, PartExtent::WHOLE),
        GeometryMismatch,
        &["tokens per block: source has 32, destination has 16"],
    );
    // Other kinds of planes.
    let mut builder = PoolLayout::builder();
    let group = builder.group("latent", Geometry::latent(DType::Bf16, 16, 4, Sharding::NONE), 10);
    builder.plane(PlaneSpec::new(group, "7", PlaneKind::Latent));
    let latent = builder.build().unwrap();
    refused(
        assign(&[&latent], &wanted.0),
        GeometryMismatch,
        &["planes: source has latent, destination has K"],
    );
}

#[test]
fn missing_heads_and_layers_are_named() {
    let mut whole = geometry();
    whole.sharding = Sharding::NONE;
    let wanted = one(whole, InnerOrder::NHD, 0, 40);
    let have = one(geometry(), InnerOrder::NHD, 0, 40);
    refused(
        assign(&[&have.0], &wanted.0),
        GeometryMismatch,
        &["heads 0..4 of layer 7", "no source holds them", "all source ranks"],
    );
    refused(
        source_stream(&have.0, &have.1, &wanted.0, &wanted.1, PartExtent::WHOLE),
        GeometryMismatch,
        &["K head 0", "plane 0 (K of layer 7)"],
    );
    let model = Model::preset("qwen3-8b").unwrap();
    let all = model.layout(0, 8, 16, 4, Arrangement::PER_LAYER_NHD).unwrap();
    let some = model
        .layout_of_layers(0, 8, 16, 4, Arrangement::PER_LAYER_NHD, |layer| layer < 20)
        .unwrap();
    refused(
        assign(&[&some], &all),
        GeometryMismatch,
        &["layers 20, 21, 22", "…", "none of the 1 sources has them"],
    );
    let target: Arc<Target> = Arc::new(Selection::single(0, 16, vec![1]).into());
    let stream = source_stream(&Arc::new(some), &target, &Arc::new(all), &target, PartExtent::WHOLE);
    refused(stream, GeometryMismatch, &["layer 20", "layers 0..19"]);
}

#[test]
fn a_missing_state_block_is_an_error() {
    let layout = || {
        let mut builder = PoolLayout::builder();
        let group = builder.group("state", Geometry::state(0, Sharding::NONE), 4);
        builder.plane(PlaneSpec::new(group, "0", PlaneKind::State).block_length(32));
        Arc::new(builder.build().unwrap())
    };
    let target = |group| -> Arc<Target> { Arc::new(Selection { groups: vec![group] }.into()) };
    let wanted = target(GroupSelection::state(3));
    refused(
        source_stream(
            &layout(),
            &target(GroupSelection::default()),
            &layout(),
            &wanted,
            PartExtent::WHOLE,
        ),
        InvalidArgument,
        &["the state block", "the source selected none"],
    );
    let without = PartExtent {
        states: false,
        ..PartExtent::WHOLE
    };
    assert_eq!(wanted.stream(&layout(), without).unwrap().length(), 0);
    let mut two = GroupSelection::state(1);
    two.blocks.push(2);
    refused(
        layout().check(&Selection { groups: vec![two] }),
        InvalidArgument,
        &["a state group has one block"],
    );
}

#[test]
fn blocks_out_of_range_never_make_a_stream() {
    let layout = with_key(geometry(), |plane| plane).map(Arc::new).unwrap();
    let target = |blocks: &[u32]| -> Arc<Target> { Arc::new(Selection::single(0, 32, blocks.to_vec()).into()) };
    let whole = PartExtent::WHOLE;
    refused(target(&[0, 10]).stream(&layout, whole), OutOfBounds, &["block 10"]);
    refused(
        target(&[0]).stream(&layout, whole),
        InvalidArgument,
        &["1 blocks for tokens 0..32"],
    );
    // The other side's block ids are its own affair: only their number matters here.
    let source = source_stream(&layout, &target(&[1, 2]), &layout, &target(&[0, 4_000_000]), whole);
    assert_eq!(source.unwrap().length(), 2 * 2 * 512);
    refused(
        source_stream(&layout, &target(&[1, 12]), &layout, &target(&[0, 1]), whole),
        OutOfBounds,
        &["block 12"],
    );
}

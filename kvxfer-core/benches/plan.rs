//! Making and expanding streams of the Llama-3.1-70B TP4 shape: 160 planes x 128 blocks of 8 KiB, scattered.
#![allow(missing_docs)] // The function that criterion generates has none.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use kvxfer_core::flow::{ByteStream, PartExtent};
use kvxfer_core::layout::{Arrangement, BlockId, Model, PoolLayout, Selection};
use kvxfer_core::memory::Segment;
use kvxfer_core::plan::{Plan, RunLimits, Scope, Target, assign, source_stream};

const TOKENS: u32 = 2048;
const CHUNK_BYTES: u64 = 1 << 20;

struct Side {
    layout: Arc<PoolLayout>,
    target: Arc<Target>,
}

fn side(rank: u16, size: u16, tokens_per_block: u32, arrangement: Arrangement, seed: u64) -> Side {
    let model = Model::preset("llama-3.1-70b").expect("a preset");
    let layout = model
        .layout(rank, size, tokens_per_block, 768, arrangement)
        .expect("a valid layout");
    let blocks = scattered(TOKENS / tokens_per_block, 768, seed);
    Side {
        layout: Arc::new(layout),
        target: Arc::new(Selection::single(0, TOKENS, blocks).into()),
    }
}

/// Distinct blocks, no two of which follow each other in memory.
fn scattered(count: u32, pool: u32, seed: u64) -> Vec<BlockId> {
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

/// The destination's target with the scope that `assign` gives to this source.
fn granted(source: &Side, destination: &Side) -> Arc<Target> {
    let scopes = assign(&[&source.layout], &destination.layout).expect("one source covers it");
    let Target::Selection { selection, .. } = &*destination.target else {
        unreachable!("made above")
    };
    Arc::new(Target::Selection {
        selection: selection.clone(),
        scope: scopes[0].clone().expect("it sends everything"),
    })
}

fn expand(stream: &dyn ByteStream, out: &mut Vec<Segment>) -> usize {
    let mut segments = 0;
    let mut offset = 0;
    while offset < stream.length() {
        out.clear();
        offset += stream.segments(offset, CHUNK_BYTES, 1024, out);
        segments += black_box(&*out).len();
    }
    segments
}

fn benches(criterion: &mut Criterion) {
    let source = side(0, 4, 16, Arrangement::PER_LAYER_NHD, 1);
    let destination = side(0, 4, 16, Arrangement::PER_LAYER_NHD, 2);
    let wanted = granted(&source, &destination);
    let whole = PartExtent::WHOLE;
    let stream = source_stream(&source.layout, &source.target, &destination.layout, &wanted, whole).expect("a stream");

    let mut group = criterion.benchmark_group("w5");
    let mut out = Vec::with_capacity(32_768);
    stream.segments(0, u64::MAX, usize::MAX, &mut out);
    group.throughput(Throughput::Elements(out.len() as u64));
    group.bench_function(format!("expand {} segments at once", out.len()), |bencher| {
        bencher.iter(|| {
            out.clear();
            stream.segments(0, u64::MAX, usize::MAX, &mut out)
        });
    });
    group.bench_function("expand in chunks of 1 MiB", |bencher| {
        bencher.iter(|| expand(&*stream, &mut out))
    });
    group.throughput(Throughput::Elements(160));
    group.bench_function("make the destination's stream", |bencher| {
        bencher.iter(|| wanted.stream(&destination.layout, whole));
    });
    group.bench_function("make the source's stream", |bencher| {
        bencher.iter(|| source_stream(&source.layout, &source.target, &destination.layout, &wanted, whole));
    });
    let layer = PartExtent {
        layer_start: 7,
        layer_end: 8,
        ..whole
    };
    group.bench_function("make the source's stream of one layer", |bencher| {
        bencher.iter(|| source_stream(&source.layout, &source.target, &destination.layout, &wanted, layer));
    });
    group.bench_function("assign one source", |bencher| {
        bencher.iter(|| assign(&[&source.layout], &destination.layout));
    });
    group.bench_function("check and count a target", |bencher| {
        bencher.iter(|| wanted.bytes(&destination.layout));
    });
    group.bench_function("runs", |bencher| {
        bencher.iter_batched(
            || Plan::new(&source.layout, &source.target, &destination.layout, &wanted, whole).expect("a plan"),
            |plan| plan.runs(RunLimits::default()).count(),
            BatchSize::SmallInput,
        );
    });
    group.finish();

    let mut group = criterion.benchmark_group("expand source");
    let others = [
        ("TP4 to TP8, NHD", side(1, 8, 16, Arrangement::PER_LAYER_NHD, 3)),
        ("TP4 to TP8, NHD to HND", side(1, 8, 16, Arrangement::PER_LAYER_HND, 4)),
        (
            "16 to 64 tokens per block",
            side(0, 4, 64, Arrangement::PER_LAYER_NHD, 5),
        ),
        ("split to fused", side(0, 4, 16, Arrangement::FUSED_NHD, 6)),
        ("to block-major", side(0, 4, 16, Arrangement::BLOCK_MAJOR_NHD, 7)),
    ];
    for (name, destination) in &others {
        let wanted = Arc::new(Target::Selection {
            selection: match &*destination.target {
                Target::Selection { selection, .. } => selection.clone(),
                Target::Descriptors(_) => unreachable!("made above"),
            },
            scope: Scope::EVERYTHING,
        });
        let stream =
            source_stream(&source.layout, &source.target, &destination.layout, &wanted, whole).expect("a stream");
        let segments = expand(&*stream, &mut out);
        group.throughput(Throughput::Elements(segments as u64));
        group.bench_function(format!("{name}: {segments} segments"), |bencher| {
            bencher.iter(|| expand(&*stream, &mut out));
        });
    }
    group.finish();

    let mut group = criterion.benchmark_group("layout");
    let model = Model::preset("llama-3.1-405b").expect("a preset");
    group.bench_function("validate 252 planes", |bencher| {
        bencher.iter(|| model.layout(0, 8, 16, 768, Arrangement::PER_LAYER_NHD));
    });
    group.bench_function("validate 252 interleaved planes", |bencher| {
        bencher.iter(|| model.layout(0, 8, 16, 768, Arrangement::BLOCK_MAJOR_NHD));
    });
    group.finish();
}

criterion_group! {
    name = plan;
    config = Criterion::default().sample_size(30).warm_up_time(std::time::Duration::from_millis(300))
        .measurement_time(std::time::Duration::from_secs(1));
    targets = benches
}
criterion_main!(plan);

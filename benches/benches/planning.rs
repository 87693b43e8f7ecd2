//! From block lists to segments: what a hand-over costs before the first byte moves.
#![allow(missing_docs, reason = "the functions are made by a macro")]
#![allow(clippy::unwrap_used, reason = "a benchmark that cannot run has nobody to report to")]

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvxfer_bench::work::{Named, TOKENS_PER_BLOCK, Work, selection};
use kvxfer_core::flow::PartExtent;
use kvxfer_core::layout::{Arrangement, HeadRange, Model, PoolLayout};
use kvxfer_core::memory::Segment;
use kvxfer_core::plan::{Scope, Target, source_stream};

const GIB: u64 = 1 << 30;
/// Segments that a data thread takes at a time: one system call's worth.
const BATCH: usize = 1024;

struct Case {
    name: String,
    source_layout: Arc<PoolLayout>,
    source: Arc<Target>,
    destination_layout: Arc<PoolLayout>,
    destination: Arc<Target>,
}

fn target(layout: &PoolLayout, blocks: &[u32], heads: Option<Vec<HeadRange>>) -> Arc<Target> {
    Arc::new(Target::Selection {
        selection: selection(layout, blocks),
        scope: Scope {
            layers: (0..layout.layers().len() as u16).collect(),
            heads,
        },
    })
}

fn same_layout(work: &Work) -> Case {
    let layout = Arc::new(work.shape.layout().unwrap());
    Case {
        name: work.name.clone(),
        source: target(&layout, &work.source, None),
        destination: target(&layout, &work.destination, None),
        source_layout: Arc::clone(&layout),
        destination_layout: layout,
    }
}

/// One of two TP8 ranks to a TP4 rank: half of the heads of every token, so blocks are cut into pieces.
fn re_sharded(work: &Work) -> Case {
    let model = Model::preset("llama-3.1-70b").unwrap();
    let layout = |size| {
        let made = model.layout(0, size, TOKENS_PER_BLOCK, work.shape.blocks, Arrangement::PER_LAYER_NHD);
        Arc::new(made.unwrap())
    };
    let (source_layout, destination_layout) = (layout(8), layout(4));
    Case {
        name: "w5_tp8_to_tp4".into(),
        source: target(&source_layout, &work.source, Some(vec![HeadRange::new(0, 1)])),
        destination: target(&destination_layout, &work.destination, Some(vec![HeadRange::new(0, 1)])),
        source_layout,
        destination_layout,
    }
}

fn planning(criterion: &mut Criterion) {
    let w5 = Named::W5.work(GIB).unwrap();
    let mut cases: Vec<Case> = [Named::W1, Named::W2, Named::W3, Named::W5]
        .map(|named| same_layout(&named.work(GIB).unwrap()))
        .into();
    cases.push(re_sharded(&w5));
    let mut group = criterion.benchmark_group("planning");
    for case in &cases {
        let plan = || {
            source_stream(
                &case.source_layout,
                &case.source,
                &case.destination_layout,
                &case.destination,
                PartExtent::WHOLE,
            )
            .unwrap()
        };
        let expand = |out: &mut Vec<Segment>| {
            let stream = plan();
            let (mut offset, mut count) = (0, 0);
            while offset < stream.length() {
                out.clear();
                offset += stream.segments(offset, stream.length() - offset, BATCH, out);
                count += out.len();
            }
            count
        };
        let mut out = Vec::with_capacity(BATCH);
        let segments = expand(&mut out) as u64;
        group.throughput(Throughput::Elements(segments));
        group.bench_function(BenchmarkId::new("plan", &case.name), |bencher| {
            bencher.iter(|| black_box(plan()))
        });
        group.bench_function(BenchmarkId::new("expand", &case.name), |bencher| {
            bencher.iter(|| black_box(expand(&mut out)));
        });
    }
    group.finish();
}

criterion_group!(benches, planning);
criterion_main!(benches);

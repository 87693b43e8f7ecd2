//! Two endpoints in one process: the submitting call, and whole transfers on loopback.
#![allow(missing_docs, reason = "the functions are made by a macro")]
#![allow(clippy::unwrap_used, reason = "a benchmark that cannot run has nobody to report to")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use kvxfer::{Endpoint, GrantOptions, Pool, PushOptions, Role, Selection};
use kvxfer_bench::memory::Memory;
use kvxfer_bench::work::{Named, Work};

/// Smaller pools than for the figures: two of them are in this one process.
const POOL_BYTES: u64 = 256 << 20;
const WAIT: Duration = Duration::from_secs(30);

struct Pair {
    from: Endpoint,
    to: Endpoint,
    source: Pool,
    destination: Pool,
    source_blocks: Selection,
    destination_blocks: Selection,
}

fn endpoint(name: &str) -> Endpoint {
    let builder = Endpoint::builder().name(name).transports(["tcp"]);
    builder.listen("127.0.0.1:0".parse().unwrap()).build().unwrap()
}

impl Pair {
    fn new(work: &Work) -> Pair {
        let (from, to) = (endpoint("from"), endpoint("to"));
        from.connect(&to.address(), WAIT).unwrap();
        let layout = work.shape.layout().unwrap();
        let pool = |endpoint: &Endpoint| {
            let memory: Arc<Memory> = Memory::touched(work.shape.bytes() as usize).unwrap();
            // SAFETY: the region keeps its mapping alive, and nothing else touches it.
            unsafe { endpoint.register(layout.clone(), vec![memory.region().unwrap()], Role::Both) }.unwrap()
        };
        Pair {
            source: pool(&from),
            destination: pool(&to),
            source_blocks: work.source_selection(&layout),
            destination_blocks: work.destination_selection(&layout),
            from,
            to,
        }
    }

    /// One push; gives the time of the call, and of all.
    fn push(&self) -> (Duration, Duration) {
        let grant = self
            .destination
            .grant(self.destination_blocks.clone(), GrantOptions::default())
            .unwrap();
        let blocks = self.source_blocks.clone();
        let begun = Instant::now();
        let transfer = self
            .from
            .push(&self.source, blocks, grant.grant(), PushOptions::default())
            .unwrap();
        let call = begun.elapsed();
        transfer.done().wait(WAIT).unwrap();
        let all = begun.elapsed();
        grant.arrived().wait(WAIT).unwrap();
        (call, all)
    }
}

fn endpoints(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("endpoint");
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    for named in [Named::W2, Named::W3, Named::W5] {
        let work = named.work(POOL_BYTES).unwrap();
        let pair = Pair::new(&work);
        group.throughput(Throughput::Elements(work.pieces()));
        group.bench_function(format!("submit {}", work.name), |bencher| {
            bencher.iter_custom(|times| (0..times).map(|_| pair.push().0).sum());
        });
        group.throughput(Throughput::Bytes(work.bytes()));
        group.bench_function(format!("push {}", work.name), |bencher| {
            bencher.iter_custom(|times| (0..times).map(|_| pair.push().1).sum());
        });
        drop((pair.source, pair.destination));
        pair.from.close(WAIT).unwrap();
        pair.to.close(WAIT).unwrap();
    }
    group.finish();
}

criterion_group!(benches, endpoints);
criterion_main!(benches);

//! What each call on the way of a hand-over costs its caller: wall and processor time of the calling thread.
//!
//! The request is that of workload w5 (128 block ids in 160 planes of 8 KiB). Before each round its 160 MiB have just
//! gone through the processor's caches. `cargo run --release -p kvxfer-bench --example calls -- [ROUNDS]`
#![allow(clippy::print_stdout)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvxfer::{
    ClaimOptions, Endpoint, GrantOptions, OfferOptions, Pool, PullOptions, PushOptions, Result, Role, Selection,
};
use kvxfer_bench::memory::Memory;
use kvxfer_bench::work::{Named, selection};
use rustix::time::{ClockId, clock_gettime};

const WAIT: Duration = Duration::from_secs(60);
const POOL_BYTES: u64 = 1 << 30;
/// Physical memory behind each pool, so that two fit a small machine.
const WINDOW_BYTES: usize = 256 << 20;
/// Blocks appended and released at a time: a step of chunked prefill of 512 tokens.
const CHUNK: usize = 32;

#[derive(Default)]
struct Times(BTreeMap<&'static str, Vec<(f64, f64)>>);

impl Times {
    fn time<T>(&mut self, call: &'static str, run: impl FnOnce() -> T) -> T {
        let (begun, cpu) = (Instant::now(), thread_micros());
        let result = run();
        let wall = begun.elapsed().as_secs_f64() * 1e6;
        self.0.entry(call).or_default().push((wall, thread_micros() - cpu));
        result
    }

    fn print(mut self) {
        println!(
            "{:<28} {:>7} {:>7} {:>7} {:>7}",
            "call (µs)", "p25", "p50", "p75", "cpu p50"
        );
        for (call, times) in &mut self.0 {
            let mut wall: Vec<f64> = times.iter().map(|time| time.0).collect();
            let mut cpu: Vec<f64> = times.iter().map(|time| time.1).collect();
            wall.sort_by(f64::total_cmp);
            cpu.sort_by(f64::total_cmp);
            let at = |values: &[f64], part: usize| values[(values.len() - 1) * part / 4];
            println!(
                "{call:<28} {:>7.1} {:>7.1} {:>7.1} {:>7.1}",
                at(&wall, 1),
                at(&wall, 2),
                at(&wall, 3),
                at(&cpu, 2)
            );
        }
    }
}

fn thread_micros() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

fn endpoint(name: &str) -> Result<Endpoint> {
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    Endpoint::builder()
        .name(name)
        .transports(["tcp"])
        .listen(address)
        .build()
}

fn main() -> Result<()> {
    let rounds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(30);
    let work = Named::W5.work(POOL_BYTES)?;
    let layout = work.shape.layout()?;
    let (from, to) = (endpoint("from")?, endpoint("to")?);
    from.connect(&to.address(), WAIT)?;
    let pool = |endpoint: &Endpoint| -> Result<Pool> {
        let memory: Arc<Memory> = Memory::repeating(work.shape.bytes() as usize, WINDOW_BYTES)?;
        // SAFETY: the region keeps its mapping alive, and nothing looks at what arrives there.
        unsafe { endpoint.register(layout.clone(), vec![memory.region()?], Role::Both) }
    };
    let (source, destination) = (pool(&from)?, pool(&to)?);
    let (ours, theirs) = (work.source_selection(&layout), work.destination_selection(&layout));
    let mut times = Times::default();
    for round in 0..rounds {
        push(&mut times, (&from, &source, &ours), (&destination, &theirs))?;
        pull(&mut times, (&source, &ours), (&to, &destination, &theirs))?;
        let key = format!("request {round}");
        hand_over(
            &mut times,
            &key,
            (&from, &source, &work.source),
            (&to, &destination, &theirs),
        )?;
    }
    times.print();
    drop((source, destination));
    from.close(WAIT)?;
    to.close(WAIT)
}

fn push(
    times: &mut Times,
    (from, source, ours): (&Endpoint, &Pool, &Selection),
    (destination, theirs): (&Pool, &Selection),
) -> Result<()> {
    let theirs = theirs.clone();
    let grant = times.time("grant", || destination.grant(theirs, GrantOptions::default()))?;
    let ours = ours.clone();
    let pushed = times.time("push", || {
        from.push(source, ours, grant.grant(), PushOptions::default())
    })?;
    pushed.done().wait(WAIT)?;
    grant.arrived().wait(WAIT)?;
    Ok(())
}

fn pull(
    times: &mut Times,
    (source, ours): (&Pool, &Selection),
    (to, destination, theirs): (&Endpoint, &Pool, &Selection),
) -> Result<()> {
    let ours = ours.clone();
    let grant = times.time("serve", || source.serve(ours, GrantOptions::default()))?;
    let theirs = theirs.clone();
    let pulled = times.time("pull", || {
        to.pull(grant.grant(), destination, theirs, PullOptions::default())
    })?;
    pulled.done().wait(WAIT)?;
    grant.arrived().wait(WAIT)?;
    Ok(())
}

/// Decode claims first and prefill works in chunks.
fn hand_over(
    times: &mut Times,
    key: &str,
    (from, source, blocks): (&Endpoint, &Pool, &[u32]),
    (to, destination, theirs): (&Endpoint, &Pool, &Selection),
) -> Result<()> {
    let at = [from.address()];
    let offer = times.time("offer", || from.offer(key, source, OfferOptions::default()))?;
    let claim = times.time("claim", || to.claim(key, destination, &at, ClaimOptions::default()))?;
    let theirs = theirs.clone();
    times.time("fill, 128 blocks", || claim.fill(theirs))?;
    // The match takes a round trip, as it would.
    std::thread::sleep(Duration::from_millis(5));
    let whole = selection(source.layout(), blocks);
    let tokens_per_block = whole.groups[0].token_end / blocks.len() as u32;
    for (index, chunk) in blocks.chunks(CHUNK).enumerate() {
        let first = (index * CHUNK) as u32 * tokens_per_block;
        let end = first + chunk.len() as u32 * tokens_per_block;
        let more = Selection::single(first, end, chunk.to_vec());
        let (append, ready) = match index {
            0 => ("append, first 32 blocks", "ready, first 512 tokens"),
            _ => ("append, 32 more", "ready, 512 more"),
        };
        times.time(append, || offer.append(&more))?;
        if end == whole.groups[0].token_end {
            times.time("finish, 512 more", || offer.finish(end))?;
        } else {
            times.time(ready, || offer.ready(first..end, ..))?;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    claim.arrived().wait(WAIT)?;
    offer.released().wait(WAIT)?;
    Ok(())
}

//! `kvxfer-bench replay`: the requests of a trace through offers and claims between two processes, through pools that
//! are smaller than the trace, every arrival verified.

mod destination;
mod source;

use std::collections::{HashMap, VecDeque};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use comfy_table::{Table, presets};
use hdrhistogram::Histogram;
use kvxfer::{Endpoint, EndpointAddress, Pool, Role};
use kvxfer_core::layout::{Arrangement, DType, Geometry, Model, PlaneKind, PlaneSpec, PoolLayout, Sharding};
use kvxfer_core::memory::Region;
use kvxfer_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::cli::{ReplayArgs, Speed};
use crate::control::Child;
use crate::memory::Memory;
use crate::rng::SplitMix64;
use crate::trace::{self, HASH_BLOCK_TOKENS};
use crate::way::Way;
use crate::work::TOKENS_PER_BLOCK;
use crate::{terminal, usage};

pub(crate) use destination::serve as destination;
pub(crate) use source::serve as source;

/// Bytes of one head of one token in one plane of the cache made from `--kv-bytes-per-token`: 128 elements of 2 bytes.
const HEAD_BYTES: u64 = 256;
/// Longest silence of a child in a replay, on top of the trace's own pauses.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// Handles open at once on each side.
const OPEN_MAX: usize = 128;
/// Time from the word to the first request: both children have started by then.
const LEAD: Duration = Duration::from_millis(100);

/// One request, for both sides.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Item {
    /// Its number, and so its key.
    number: u64,
    /// When it comes, in nanoseconds after the start; 0 for all of them at full speed.
    at_nanos: u64,
    /// Tokens of it.
    tokens: u32,
    /// Tokens that the destination holds already.
    held: u32,
}

impl Item {
    fn key(&self) -> String {
        format!("request-{}", self.number)
    }
}

/// What both children are set up with.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Setup {
    layout: PoolLayout,
    transport: String,
    pull: bool,
    items: Vec<Item>,
}

#[derive(Debug, Serialize, Deserialize)]
enum Request {
    Start(Box<Setup>),
    /// Replay from this time of the machine's clock on.
    Go {
        source: EndpointAddress,
        start_nanos: u64,
    },
}

/// What children say during a replay.
#[derive(Debug, Serialize, Deserialize)]
enum Word {
    /// So many requests have ended.
    Progress(u64),
    /// All have.
    Done(Report),
}

/// What one side saw.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Report {
    /// Source: when the last part of each request was released. Destination: when its blocks were known.
    given_nanos: Vec<u64>,
    /// When each ended.
    ended_nanos: Vec<u64>,
    /// Bytes of each arrival; empty at the source.
    bytes: Vec<u64>,
    /// Requests that did not end well, or whose bytes were wrong.
    failures: Vec<String>,
    /// Bytes that were looked at.
    verified_bytes: u64,
    /// Handles open at once, at most.
    open_peak: usize,
    /// Those of them that had blocks.
    with_blocks_peak: usize,
}

/// The result, for people and programs.
#[derive(Debug, Serialize)]
struct Summary {
    trace: String,
    requests: usize,
    tokens: u64,
    tokens_held: u64,
    bytes: u64,
    pool_bytes: u64,
    times_through_the_pool: f64,
    seconds: f64,
    gbps: f64,
    requests_per_s: f64,
    hand_over_p50_ms: f64,
    hand_over_p90_ms: f64,
    hand_over_p99_ms: f64,
    hand_over_max_ms: f64,
    open_grants_peak: usize,
    open_claims_peak: usize,
    open_offers_peak: usize,
    verified_bytes: u64,
    failures: usize,
}

/// Replays the trace.
pub(crate) fn run(arguments: &ReplayArgs) -> Result<bool> {
    let requests = trace::read(&arguments.trace, arguments.requests)?;
    let (layout, bytes_per_block) = layout(arguments)?;
    let blocks = u64::from(layout.cache_groups().first().map_or(0, |group| group.blocks));
    let items = items(arguments, &requests, blocks, bytes_per_block)?;
    let setup = Setup {
        layout,
        transport: arguments.transport.clone(),
        pull: arguments.pull,
        items,
    };
    let longest_pause = setup
        .items
        .windows(2)
        .map(|pair| pair[1].at_nanos.saturating_sub(pair[0].at_nanos))
        .max()
        .unwrap_or(0);
    let silence = SILENCE_MAX + Duration::from_nanos(longest_pause);

    let mut source = Child::start("prefill", &["peer", "replay-source"])?;
    let mut destination = Child::start("decode", &["peer", "replay-destination"])?;
    source.send(&Request::Start(Box::new(setup.clone())))?;
    destination.send(&Request::Start(Box::new(setup.clone())))?;
    let address: EndpointAddress = source.answered(SILENCE_MAX)?;
    let _: EndpointAddress = destination.answered(SILENCE_MAX)?;
    let begun = Instant::now();
    let go = Request::Go {
        source: address,
        start_nanos: usage::clock_nanos() + LEAD.as_nanos() as u64,
    };
    source.send(&go)?;
    destination.send(&go)?;
    let bar = (!arguments.json).then(|| terminal::progress(setup.items.len() as u64, "requests handed over"));
    let arrived = loop {
        match destination.answered(silence)? {
            Word::Progress(count) => {
                if let Some(bar) = &bar {
                    bar.set_position(count);
                }
            }
            Word::Done(report) => break report,
        }
    };
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let elapsed = begun.elapsed().saturating_sub(LEAD);
    let released = loop {
        if let Word::Done(report) = source.answered(silence)? {
            break report;
        }
    };
    tell(arguments, &setup, &arrived, &released, elapsed)
}

fn tell(arguments: &ReplayArgs, setup: &Setup, arrived: &Report, released: &Report, elapsed: Duration) -> Result<bool> {
    let internal = |error: String| Error::new(ErrorKind::Internal, "a histogram").because(error);
    let mut latency = Histogram::<u64>::new(3).map_err(|error| internal(error.to_string()))?;
    for index in 0..setup.items.len() {
        if arrived.ended_nanos[index] == 0 {
            continue;
        }
        let possible = arrived.given_nanos[index].max(released.given_nanos[index]);
        let nanos = arrived.ended_nanos[index].saturating_sub(possible);
        latency.record(nanos).map_err(|error| internal(error.to_string()))?;
    }
    let millis = |quantile: f64| crate::statistics::rounded(latency.value_at_quantile(quantile) as f64 / 1e6, 3);
    let bytes: u64 = arrived.bytes.iter().sum();
    let pool_bytes: u64 = setup.layout.region_lengths().iter().sum();
    let seconds = elapsed.as_secs_f64();
    let summary = Summary {
        trace: arguments.trace.display().to_string(),
        requests: setup.items.len(),
        tokens: setup.items.iter().map(|item| u64::from(item.tokens)).sum(),
        tokens_held: setup.items.iter().map(|item| u64::from(item.held)).sum(),
        bytes,
        pool_bytes,
        times_through_the_pool: crate::statistics::rounded(bytes as f64 / pool_bytes as f64, 2),
        seconds: crate::statistics::rounded(seconds, 3),
        gbps: crate::statistics::rounded(bytes as f64 / seconds / 1e9, 3),
        requests_per_s: crate::statistics::rounded(setup.items.len() as f64 / seconds, 2),
        hand_over_p50_ms: millis(0.5),
        hand_over_p90_ms: millis(0.9),
        hand_over_p99_ms: millis(0.99),
        hand_over_max_ms: millis(1.0),
        open_grants_peak: arrived.with_blocks_peak,
        open_claims_peak: arrived.open_peak,
        open_offers_peak: released.open_peak,
        verified_bytes: arrived.verified_bytes,
        failures: arrived.failures.len() + released.failures.len(),
    };
    if arguments.json {
        terminal::json_line(&summary)?;
    } else {
        print(&summary);
    }
    for failure in arrived.failures.iter().chain(&released.failures).take(20) {
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("{failure}\n"));
    }
    Ok(summary.failures == 0 && summary.verified_bytes == bytes)
}

fn print(summary: &Summary) {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    table.add_row(["trace".to_owned(), summary.trace.clone()]);
    table.add_row([
        "requests".to_owned(),
        format!(
            "{}, {} tokens, {} of them held already",
            summary.requests, summary.tokens, summary.tokens_held
        ),
    ]);
    table.add_row([
        "moved".to_owned(),
        format!(
            "{} through pools of {} ({} times)",
            terminal::bytes(summary.bytes),
            terminal::bytes(summary.pool_bytes),
            summary.times_through_the_pool
        ),
    ]);
    table.add_row([
        "throughput".to_owned(),
        format!(
            "{} GB/s, {} requests/s over {} s, with making and checking the bytes",
            summary.gbps, summary.requests_per_s, summary.seconds
        ),
    ]);
    table.add_row([
        "hand-over latency".to_owned(),
        format!(
            "p50 {} ms, p90 {} ms, p99 {} ms, most {} ms",
            summary.hand_over_p50_ms, summary.hand_over_p90_ms, summary.hand_over_p99_ms, summary.hand_over_max_ms
        ),
    ]);
    table.add_row([
        "open at once".to_owned(),
        format!(
            "{} grants, {} claims, {} offers at most",
            summary.open_grants_peak, summary.open_claims_peak, summary.open_offers_peak
        ),
    ]);
    table.add_row([
        "verified".to_owned(),
        match summary.failures {
            0 => format!("every byte of every arrival ({} bytes)", summary.verified_bytes),
            failures => format!("FAILED: {failures} requests"),
        },
    ]);
    terminal::line(&table.to_string());
}

/// The pool's layout, and bytes of one block id over all planes.
fn layout(arguments: &ReplayArgs) -> Result<(PoolLayout, u64)> {
    let make = |blocks: u32| -> Result<PoolLayout> {
        if let Some(model) = &arguments.model {
            let model = Model::preset(model)?;
            return model.layout(0, arguments.tp, TOKENS_PER_BLOCK, blocks, Arrangement::PER_LAYER_NHD);
        }
        let per_token = arguments.kv_bytes_per_token;
        if per_token == 0 || !per_token.is_multiple_of(2 * HEAD_BYTES) {
            return Err(
                Error::new(ErrorKind::InvalidArgument, format!("--kv-bytes-per-token {per_token}"))
                    .because(format!("a layer has {HEAD_BYTES} bytes of K and of V per token"))
                    .remedy(format!("give a multiple of {}", 2 * HEAD_BYTES)),
            );
        }
        let mut builder = PoolLayout::builder();
        let geometry = Geometry::attention(
            DType::Bf16,
            TOKENS_PER_BLOCK,
            1,
            128,
            Sharding::Heads { rank: 0, size: 1 },
        );
        let group = builder.group("attention", geometry, blocks);
        for layer in 0..per_token / (2 * HEAD_BYTES) {
            for kind in [PlaneKind::Key, PlaneKind::Value] {
                builder.plane(PlaneSpec::new(group, layer.to_string(), kind));
            }
        }
        builder.build()
    };
    let bytes_per_block: u64 = make(1)?.planes().iter().map(|plane| plane.block_length).sum();
    let blocks = u32::try_from(arguments.pool_bytes / bytes_per_block).unwrap_or(u32::MAX);
    if blocks == 0 {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("--pool-bytes {}", arguments.pool_bytes),
        )
        .because(format!(
            "one block of {TOKENS_PER_BLOCK} tokens takes {bytes_per_block} bytes"
        ))
        .remedy("give more"));
    }
    Ok((make(blocks)?, bytes_per_block))
}

fn items(arguments: &ReplayArgs, requests: &[trace::Request], blocks: u64, bytes_per_block: u64) -> Result<Vec<Item>> {
    let mut held = Held::new(arguments.held_prefixes);
    let item = |(number, request): (usize, &trace::Request)| {
        let needed = u64::from(request.tokens.div_ceil(TOKENS_PER_BLOCK));
        if needed > blocks {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("a request of {} tokens", request.tokens),
            )
            .at(format!("{}, line {}", arguments.trace.display(), request.line))
            .because(format!(
                "it takes {}, the pool has {}",
                terminal::bytes(needed * bytes_per_block),
                terminal::bytes(blocks * bytes_per_block)
            ))
            .remedy("give more --pool-bytes, or fewer --kv-bytes-per-token"));
        }
        Ok(Item {
            number: number as u64,
            at_nanos: match arguments.speed {
                Speed::Max => 0,
                Speed::Times(times) => (request.at.as_nanos() as f64 / times) as u64,
            },
            tokens: request.tokens,
            held: held.tokens_of(request),
        })
    };
    requests.iter().enumerate().map(item).collect()
}

/// The prefixes that the decode side would still hold: the last so many hash ids it has seen.
struct Held {
    limit: usize,
    last_use: HashMap<u64, u64>,
    order: VecDeque<(u64, u64)>,
    clock: u64,
}

impl Held {
    fn new(limit: usize) -> Self {
        Held {
            limit,
            last_use: HashMap::new(),
            order: VecDeque::new(),
            clock: 0,
        }
    }

    /// Tokens of the request's beginning that are held; at least one token is left to be moved.
    fn tokens_of(&mut self, request: &trace::Request) -> u32 {
        if self.limit == 0 {
            return 0;
        }
        let known = request
            .hash_ids
            .iter()
            .take_while(|id| self.last_use.contains_key(id))
            .count();
        for &id in &request.hash_ids {
            self.clock += 1;
            self.last_use.insert(id, self.clock);
            self.order.push_back((id, self.clock));
        }
        while self.last_use.len() > self.limit {
            let Some((id, used)) = self.order.pop_front() else {
                break;
            };
            // Used again since: its later entry counts.
            if self.last_use.get(&id) == Some(&used) {
                self.last_use.remove(&id);
            }
        }
        let tokens = known as u32 * HASH_BLOCK_TOKENS;
        tokens.min((request.tokens - 1) / HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS)
    }
}

/// One side's endpoint, pool and free blocks.
struct Worker {
    endpoint: Endpoint,
    pool: Pool,
    layout: Arc<PoolLayout>,
    regions: Vec<Arc<Region>>,
    free: Vec<u32>,
    random: SplitMix64,
}

impl Worker {
    fn start(name: &str, setup: &Setup) -> Result<Worker> {
        let endpoint = Way::by(&setup.transport).endpoint(name, Ipv4Addr::LOCALHOST.into(), false)?;
        let lengths = setup.layout.region_lengths().iter();
        let regions = lengths
            .map(|&length| Memory::touched(length as usize)?.region())
            .collect::<Result<Vec<_>>>()?;
        // SAFETY: the regions keep their mappings alive; blocks are written before they are offered and read after
        // the handle that named them has ended.
        let pool = unsafe { endpoint.register(setup.layout.clone(), regions.clone(), Role::Both) }?;
        let blocks = setup.layout.cache_groups().first().map_or(0, |group| group.blocks);
        Ok(Worker {
            layout: Arc::clone(pool.layout()),
            endpoint,
            pool,
            regions,
            free: (0..blocks).collect(),
            random: SplitMix64::new(name.len() as u64),
        })
    }

    /// Blocks for so many tokens, scattered, if there are enough.
    fn take(&mut self, tokens: u32) -> Option<Vec<u32>> {
        let count = tokens.div_ceil(TOKENS_PER_BLOCK) as usize;
        if count > self.free.len() {
            return None;
        }
        let taken = (0..count).map(|_| {
            let at = self.random.below(self.free.len() as u64) as usize;
            self.free.swap_remove(at)
        });
        Some(taken.collect())
    }
}

/// How long until the clock shows this time.
fn until(nanos: u64) -> Duration {
    Duration::from_nanos(nanos.saturating_sub(usage::clock_nanos()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(tokens: u32, hash_ids: &[u64]) -> trace::Request {
        trace::Request {
            at: Duration::ZERO,
            tokens,
            hash_ids: hash_ids.to_vec(),
            line: 1,
        }
    }

    #[test]
    fn held_prefixes_are_those_seen_lately() {
        let mut held = Held::new(3);
        assert_eq!(held.tokens_of(&request(1200, &[1, 2, 3])), 0);
        assert_eq!(
            held.tokens_of(&request(1200, &[1, 2, 9])),
            1024,
            "two blocks are shared"
        );
        // 9 drove out 3; 1 and 2 were used again.
        assert_eq!(held.tokens_of(&request(1200, &[1, 2, 3])), 1024);
        assert_eq!(
            held.tokens_of(&request(1024, &[1, 2])),
            512,
            "something must be left to move"
        );
        assert_eq!(held.tokens_of(&request(5, &[1])), 0);
        assert_eq!(Held::new(0).tokens_of(&request(1200, &[1, 2, 3])), 0);
    }
}

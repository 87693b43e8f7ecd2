//! What the integration tests share: small pools, pairs of endpoints, verified bytes.

pub mod gpus;
pub mod site;

use crate::place;

use std::future::{Future, IntoFuture};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use kvxfer::layout::{DType, Geometry, InnerOrder, PlaneKind, PlaneSpec, Sharding};
use kvxfer::{Config, Endpoint, ErrorKind, Pool, PoolLayout, Region, Result, Role, Selection};
use kvxfer_testkit::pattern::{self, Content};
use kvxfer_testkit::touch;

/// Longer than anything takes that works.
pub const LONG: Duration = Duration::from_secs(20);
/// Tokens in a block.
pub const PER_BLOCK: u32 = 16;
/// Layers of the test model.
pub const LAYERS: u16 = 4;
/// Blocks of a test pool.
pub const BLOCKS: u32 = 64;

/// What an earlier test of this thread has made is no more.
pub fn forget() {
    site::forget();
    gpus::forget();
}

pub fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// Settings whose deadlines suit tests, for the transport that the binary's tests are about.
pub fn config() -> Config {
    let mut config = Config::default();
    config.transports = vec![place().over.into()];
    config.deadlines.verdict_retention_ms = 2_000;
    if place().over == "rdma" {
        site::site().configure(&mut config);
    }
    config
}

/// As [`config`], on the `n`th side of the wire: what goes to the other side leaves its device.
pub fn config_on(side: usize) -> Config {
    let mut config = config();
    if place().over == "rdma" {
        config.devices = vec![site::site().device(side)];
    }
    config
}

pub fn endpoint(name: &str) -> Endpoint {
    endpoint_with(name, config())
}

/// Whether an endpoint of that name is one of those who take.
fn takes(name: &str) -> bool {
    ["decode", "receiver", "reader", "b"]
        .iter()
        .any(|side| name.starts_with(side))
}

/// Those who give are on one side, those who take on the other, unless the settings say where.
pub fn endpoint_with(name: &str, mut config: Config) -> Endpoint {
    // Logs to the test's output as RUST_LOG says.
    let filter = tracing_subscriber::EnvFilter::from_default_env();
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_test_writer()
        .try_init();
    if place().over == "rdma" && config.devices.is_empty() {
        config.devices = vec![site::site().device(usize::from(takes(name)))];
    }
    Endpoint::builder().config(config).name(name).build().unwrap()
}

/// A small model with 8 kv heads: one rank's pool.
pub fn layout_of(rank: u16, size: u16, per_block: u32, blocks: u32, order: InnerOrder) -> PoolLayout {
    let mut builder = PoolLayout::builder();
    let geometry = Geometry::attention(DType::Bf16, per_block, 8, 8, Sharding::Heads { rank, size });
    let group = builder.group("attention", geometry, blocks);
    for layer in 0..LAYERS {
        for kind in [PlaneKind::Key, PlaneKind::Value] {
            builder.plane(PlaneSpec::new(group, layer.to_string(), kind).order(order));
        }
    }
    builder.build().unwrap()
}

pub fn layout() -> PoolLayout {
    layout_of(0, 1, PER_BLOCK, BLOCKS, InnerOrder::NHD)
}

/// An endpoint with a pool.
pub struct Side {
    pub pool: Pool,
    pub endpoint: Endpoint,
    // After both.
    pub used: gpus::Used,
}

impl Side {
    pub fn new(name: &str) -> Side {
        Side::with(name, config(), layout(), Role::Both)
    }

    pub fn with(name: &str, config: Config, layout: PoolLayout, role: Role) -> Side {
        let endpoint = endpoint_with(name, config);
        let used = gpus::Used::by(name);
        let pool = used.pool(&endpoint, layout, role);
        Side { pool, endpoint, used }
    }
}

/// A prefill and a decode side.
pub fn pair() -> (Side, Side) {
    let sides = (Side::new("prefill"), Side::new("decode"));
    gpus::map(&sides.0, &sides.1);
    sides
}

/// Tokens `0..tokens` in these blocks.
pub fn tokens(tokens: u32, blocks: impl IntoIterator<Item = u32>) -> Selection {
    Selection::single(0, tokens, blocks.into_iter().collect())
}

fn locate(pool: &Pool, plane: u32, block: u32, offset: u32) -> (&Arc<Region>, u64) {
    let plane = &pool.layout().planes()[plane as usize];
    let start = plane.base + u64::from(block) * plane.stride + u64::from(offset);
    (&pool.regions()[plane.region as usize], start)
}

/// Writes bytes of a block of a plane, not by the code under test.
pub fn put(pool: &Pool, plane: u32, block: u32, offset: u32, bytes: &[u8]) -> Result<()> {
    let (region, start) = locate(pool, plane, block, offset);
    touch::put(region, start, bytes)
}

/// Reads bytes of a block of a plane, not by the code under test.
pub fn get(pool: &Pool, plane: u32, block: u32, offset: u32, bytes: &mut [u8]) -> Result<()> {
    let (region, start) = locate(pool, plane, block, offset);
    touch::get(region, start, bytes)
}

pub fn fill(pool: &Pool, selection: &Selection, key: &str, attempt: u32) {
    let content = Content::new(key.as_bytes(), attempt);
    pattern::fill(
        pool.layout(),
        pool.regions(),
        selection,
        0..u32::MAX,
        0..u16::MAX,
        content,
    )
    .unwrap();
}

pub fn poison(pool: &Pool, selection: &Selection) {
    pattern::poison(pool.layout(), pool.regions(), selection, 99).unwrap();
}

pub fn check(pool: &Pool, selection: &Selection, key: &str, attempt: u32) -> Result<u64> {
    let content = Content::new(key.as_bytes(), attempt);
    pattern::verify(
        pool.layout(),
        pool.regions(),
        selection,
        0..u32::MAX,
        0..u16::MAX,
        content,
    )
}

/// All bytes are those of this key; and the check sees it when one is not.
pub fn verify(pool: &Pool, selection: &Selection, key: &str, attempt: u32) {
    let checked = check(pool, selection, key, attempt).unwrap();
    assert!(checked > 0);
    let block = selection.groups[0].blocks[0];
    let first = selection.groups[0].first_token % pool.layout().cache_groups()[0].geometry.tokens_per_block;
    // A byte of the first selected token of the first block: NHD and HND both have it at the row's start in head 0.
    let row =
        pool.layout().planes()[0].block_length / u64::from(pool.layout().cache_groups()[0].geometry.tokens_per_block);
    if pool.layout().planes()[0].order == InnerOrder::NHD {
        let offset = u32::try_from(u64::from(first) * row).unwrap();
        let mut byte = [0];
        pool.copy_out(0, block, offset, &mut byte).unwrap();
        pool.copy_in(0, block, offset, &[byte[0] ^ 1]).unwrap();
        assert_eq!(
            check(pool, selection, key, attempt).unwrap_err().kind(),
            ErrorKind::Corrupt
        );
        pool.copy_in(0, block, offset, &byte).unwrap();
    }
}

/// Everything a pool's blocks hold.
pub fn snapshot(pool: &Pool) -> Vec<u8> {
    let mut all = Vec::new();
    for region in pool.regions() {
        let start = all.len();
        all.resize(start + usize::try_from(region.length()).unwrap(), 0);
        touch::get(region, 0, &mut all[start..]).unwrap();
    }
    all
}

/// The sum of a counter over its labels, of those whose labels contain this text. 0 if there is none.
pub fn metric_sum(endpoint: &Endpoint, name: &str, labels: &str) -> f64 {
    let text = endpoint.metrics();
    text.lines()
        .filter(|line| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])) && line.contains(labels)
        })
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
        .sum()
}

/// Bytes that an endpoint's devices were told to move and have not said to have moved: `sent` or `read`.
pub fn under_way(endpoint: &Endpoint, direction: &str) -> f64 {
    let label = format!("direction=\"{direction}\"");
    // In this order, so that what moves meanwhile does not seem to be under way.
    let posted = metric_sum(endpoint, "kvxfer_rail_posted_bytes_total", &label);
    posted - metric_sum(endpoint, "kvxfer_rail_bytes_total", &label)
}

/// The value of a gauge or counter without labels.
pub fn metric(endpoint: &Endpoint, name: &str) -> f64 {
    let text = endpoint.metrics();
    let line = text.lines().find(|line| line.split(' ').next() == Some(name));
    line.unwrap_or_else(|| panic!("no {name} in\n{text}"))
        .rsplit(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap()
}

/// Asks until it is true.
pub fn eventually(what: &str, mut true_now: impl FnMut() -> bool) {
    let began = Instant::now();
    while !true_now() {
        assert!(began.elapsed() < LONG, "never came true: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

struct Unpark(Thread);
impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The smallest executor there is: shows that nothing here needs another.
pub fn block_on<F: IntoFuture>(future: F) -> F::Output {
    let mut future = pin!(future.into_future());
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park_timeout(LONG),
        }
    }
}

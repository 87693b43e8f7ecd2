//! A process of the check: a worker with an engine of its own on the device, and pools in device and in host memory.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvxfer::{
    Claim, ClaimOptions, Config, Endpoint, EndpointAddress, Grant, GrantHandle, GrantOptions, Offer, OfferOptions,
    Pool, PushOptions, Role, Selection,
};
use kvxfer_core::layout::{Arrangement, Model, PoolLayout};
use kvxfer_core::memory::Region;
use kvxfer_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use super::engine::{Blocks, Engine, Memory, Stream, expected};
use crate::control;
use crate::rng::SplitMix64;
use crate::work::{TOKENS_PER_BLOCK, Work};

/// What destinations hold before.
const POISON: u8 = 0xe7;
/// How long a hand-over may take on a busy machine.
const HANDOVER_MAX: Duration = Duration::from_secs(30);
/// The model whose requests are handed over while kernels produce them: 32 planes of 16 KiB.
const MODEL: &str = r#"
[[model]]
name = "small"
dtype = "bf16"
[[model.group]]
name = "attention"
kind = "attention"
layers = [{ first = 0, end = 16 }]
kv_heads = 4
head_size = 128
"#;
/// Blocks of its pool: a few requests, so that blocks are reused at once.
const MODEL_BLOCKS: u32 = 64;
/// Parts of a request, and blocks of a part.
pub(super) const PARTS: u32 = 4;
const PART_BLOCKS: u32 = 4;

/// Where a pool is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum Kind {
    Host,
    Device,
}

/// How a node is set up.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Setup {
    pub(super) name: String,
    pub(super) library: String,
    pub(super) device: i32,
    /// Whether the two map each other's memory.
    pub(super) share: bool,
    pub(super) works: Vec<Work>,
}

/// What the parent asks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// First of all.
    Start(Setup),
    /// Connect ahead of time.
    Connect(EndpointAddress),
    /// Destination: poison the workload's blocks and grant them.
    Grant { work: usize, kind: Kind },
    /// Source: fill the workload's blocks, then push them; the seconds that the push took.
    Push {
        work: usize,
        kind: Kind,
        seed: u64,
        grant: Grant,
    },
    /// Destination: wait for the arrival; how many words are wrong.
    Check { work: usize, kind: Kind, seed: u64 },
    /// Destination: poison a request's blocks and claim it; with `hold`, its check is enqueued on a stream that waits.
    Claim {
        request: u32,
        source: EndpointAddress,
        hold: bool,
    },
    /// Source: produce a request part by part, each late by up to `wait_us`, and offer it; `gated` by events.
    Offer { request: u32, wait_us: u64, gated: bool },
    /// Destination: how many words of the request are wrong.
    Verify { request: u32 },
    /// Source: wait until the blocks may be overwritten.
    Released { request: u32 },
    /// How often each function of the driver was called by kvxfer, and what it pinned.
    Counters,
    /// What is known of the path to a peer.
    Explain(EndpointAddress),
}

/// Serves the parent.
pub(crate) fn serve() -> Result<()> {
    let mut node: Option<Node> = None;
    control::serve_parent(|request, channel| {
        if let Request::Start(setup) = &request {
            return channel.answer(Node::start(setup).map(|started| {
                let address = started.endpoint.address();
                node = Some(started);
                address
            }));
        }
        let Some(node) = node.as_mut() else {
            return channel.answer::<()>(Err(Error::new(ErrorKind::Protocol, "a request before Start")));
        };
        match request {
            Request::Start(_) => Ok(()),
            Request::Connect(address) => channel.answer(node.endpoint.connect(&address, HANDOVER_MAX)),
            Request::Grant { work, kind } => channel.answer(node.grant(work, kind)),
            Request::Push {
                work,
                kind,
                seed,
                grant,
            } => channel.answer(node.push(work, kind, seed, &grant)),
            Request::Check { work, kind, seed } => channel.answer(node.check(work, kind, seed)),
            Request::Claim { request, source, hold } => channel.answer(node.claim(request, &source, hold)),
            Request::Offer {
                request,
                wait_us,
                gated,
            } => channel.answer(node.offer(request, wait_us, gated)),
            Request::Verify { request } => channel.answer(node.verify(request)),
            Request::Released { request } => channel.answer(node.released(request)),
            Request::Counters => channel.answer(Ok(node.counters())),
            Request::Explain(address) => channel.answer(Ok(node.endpoint.explain(&address))),
        }
    })?;
    match node {
        Some(node) => node.endpoint.close(Duration::from_secs(2)),
        None => Ok(()),
    }
}

struct Node {
    endpoint: Endpoint,
    engine: Arc<Engine>,
    stream: Stream,
    works: Vec<Place>,
    granted: HashMap<(usize, Kind), GrantHandle>,
    model: ModelPool,
    offers: HashMap<u32, Offer>,
    /// Block lists that kernels under way read.
    lists: Vec<Memory>,
    claims: HashMap<u32, (Claim, Check)>,
}

/// A workload with its pools.
struct Place {
    work: Work,
    pools: HashMap<Kind, (Pool, Arc<Region>, u64)>,
    /// The block lists, for kernels.
    source: Memory,
    destination: Memory,
}

/// The pool that kernels produce requests in.
struct ModelPool {
    pool: Pool,
    layout: Arc<PoolLayout>,
    base: u64,
}

/// A check on its way: its count of wrong words, on the device and then on the host, and the lists that it reads.
struct Check {
    stream: Stream,
    count: Memory,
    result: Memory,
    lists: Vec<Memory>,
}

impl Node {
    fn start(setup: &Setup) -> Result<Node> {
        let engine = Engine::open(&setup.library, setup.device)?;
        let mut config = Config::from_env()?;
        config.set("cuda.library", &setup.library)?;
        config.set("cuda.share", if setup.share { "true" } else { "false" })?;
        let endpoint = Endpoint::builder()
            .config(config)
            .name(&setup.name)
            .listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
            .transports(["tcp"])
            .build()?;
        let stream = engine.stream()?;
        let works = setup.works.iter().map(|work| Place::new(work, &engine, &endpoint));
        let works = works.collect::<Result<_>>()?;
        let models = Model::from_toml(MODEL)?;
        let model = models
            .first()
            .ok_or_else(|| Error::new(ErrorKind::Internal, "a check without a model"))?;
        let layout = model.layout(0, 1, TOKENS_PER_BLOCK, MODEL_BLOCKS, Arrangement::PER_LAYER_NHD)?;
        let bytes = layout.region_lengths().iter().sum();
        let memory = engine.allocate(bytes)?;
        let base = memory.address;
        let mut at = base;
        let memory = Arc::new(memory);
        let mut regions = Vec::new();
        for &length in layout.region_lengths() {
            regions.push(device_region(&endpoint, at, length, memory.clone())?);
            at += length;
        }
        // SAFETY: the regions keep the memory; blocks are written only when no handle names them.
        let pool = unsafe { endpoint.register(layout, regions, Role::Both) }?;
        Ok(Node {
            model: ModelPool {
                layout: pool.layout().clone(),
                pool,
                base,
            },
            endpoint,
            engine,
            stream,
            works,
            granted: HashMap::new(),
            offers: HashMap::new(),
            lists: Vec::new(),
            claims: HashMap::new(),
        })
    }

    // --------------------------------------------------------------------------------- whole workloads, for figures

    fn grant(&mut self, work: usize, kind: Kind) -> Result<Grant> {
        let place = self.place(work)?;
        let (pool, region, base) = place.pool(kind)?;
        let blocks = &place.work.destination;
        match kind {
            Kind::Device => {
                for plane in 0..place.work.shape.planes {
                    for &block in blocks {
                        let at = base + place.work.shape.offset(plane, block);
                        self.stream.set(at, POISON, place.work.shape.block_bytes)?;
                    }
                }
                self.stream.wait()?;
            }
            Kind::Host => {
                let poison = vec![POISON; place.work.shape.block_bytes as usize];
                for plane in 0..place.work.shape.planes {
                    for &block in blocks {
                        region.copy_in(place.work.shape.offset(plane, block), &poison)?;
                    }
                }
            }
        }
        let selection = place.work.destination_selection(pool.layout());
        let handle = pool.grant(selection, GrantOptions::default())?;
        let grant = handle.grant().clone();
        self.granted.insert((work, kind), handle);
        Ok(grant)
    }

    fn push(&mut self, work: usize, kind: Kind, seed: u64, grant: &Grant) -> Result<f64> {
        let place = self.place(work)?;
        let (pool, region, base) = place.pool(kind)?;
        let shape = &place.work.shape;
        for plane in 0..shape.planes {
            match kind {
                Kind::Device => {
                    self.stream
                        .fill(place.blocks(base, plane, &place.source), plane_seed(seed, plane), 0)?
                }
                Kind::Host => {
                    let mut bytes = Vec::with_capacity(shape.block_bytes as usize);
                    for (index, &block) in place.work.source.iter().enumerate() {
                        bytes.clear();
                        let words = 0..(shape.block_bytes / 8) as u32;
                        bytes.extend(
                            words.flat_map(|word| expected(plane_seed(seed, plane), index as u32, word).to_le_bytes()),
                        );
                        region.copy_in(shape.offset(plane, block), &bytes)?;
                    }
                }
            }
        }
        self.stream.wait()?;
        let selection = place.work.source_selection(pool.layout());
        let begun = Instant::now();
        let transfer = self.endpoint.push(pool, selection, grant, PushOptions::default())?;
        transfer.done().wait(HANDOVER_MAX)?;
        Ok(begun.elapsed().as_secs_f64())
    }

    fn check(&mut self, work: usize, kind: Kind, seed: u64) -> Result<u64> {
        let handle = self
            .granted
            .remove(&(work, kind))
            .ok_or_else(|| Error::new(ErrorKind::Protocol, "a check before its grant"))?;
        handle.arrived().wait(HANDOVER_MAX)?;
        let place = self.place(work)?;
        let (_, region, base) = place.pool(kind)?;
        let shape = &place.work.shape;
        if kind == Kind::Device {
            // Kernels that are launched after the arrival see the bytes.
            let check = Check::new(&self.engine)?;
            for plane in 0..shape.planes {
                let blocks = place.blocks(base, plane, &place.destination);
                check
                    .stream
                    .check(blocks, plane_seed(seed, plane), check.count.address)?;
            }
            return check.result();
        }
        let mut wrong = 0;
        let mut bytes = vec![0; shape.block_bytes as usize];
        for plane in 0..shape.planes {
            for (index, &block) in place.work.destination.iter().enumerate() {
                region.copy_out(shape.offset(plane, block), &mut bytes)?;
                for (word, found) in bytes.chunks_exact(8).enumerate() {
                    let right = expected(plane_seed(seed, plane), index as u32, word as u32).to_le_bytes();
                    wrong += u64::from(found != right);
                }
            }
        }
        Ok(wrong)
    }

    fn place(&self, work: usize) -> Result<&Place> {
        self.works
            .get(work)
            .ok_or_else(|| Error::new(ErrorKind::Protocol, format!("workload {work}")))
    }

    // ------------------------------------------------------------------------ requests that kernels produce and check

    fn offer(&mut self, request: u32, wait_us: u64, gated: bool) -> Result<()> {
        let offer = self
            .endpoint
            .offer(key(request), &self.model.pool, OfferOptions::default())?;
        let mut random = SplitMix64::new(u64::from(request) + 1);
        for part in 0..PARTS {
            let blocks = part_blocks(request, part);
            let tokens = part_tokens(part);
            let list = list(&self.engine, &blocks)?;
            for plane in 0..self.model.planes() {
                // The first kernel of a part waits, so that everything of it is late.
                let wait_ns = match plane {
                    0 => random.below(wait_us * 1000 + 1),
                    _ => 0,
                };
                let blocks = self.model.blocks(plane, &list, PART_BLOCKS)?;
                self.stream.fill(blocks, part_seed(request, part, plane), wait_ns)?;
            }
            offer.append(Selection::single(tokens.start, tokens.end, blocks))?;
            if gated {
                let event = self.stream.record()?;
                // SAFETY: a live event, which may go as soon as the call is over.
                let after = unsafe { self.endpoint.after_cuda_event(event.raw) }?;
                offer.ready_after(tokens, .., &after)?;
            } else {
                offer.ready(tokens, ..)?;
            }
            // Read by kernels that may still run.
            self.lists.push(list);
        }
        offer.finish(PARTS * PART_BLOCKS * TOKENS_PER_BLOCK)?;
        self.offers.insert(request, offer);
        Ok(())
    }

    fn claim(&mut self, request: u32, source: &EndpointAddress, hold: bool) -> Result<()> {
        let blocks = request_blocks(request);
        for plane in 0..self.model.planes() {
            for &block in &blocks {
                let at = self.model.address(plane, block)?;
                self.stream.set(at, POISON, self.model.block_bytes())?;
            }
        }
        self.stream.wait()?;
        let claim = self.endpoint.claim(
            key(request),
            &self.model.pool,
            std::slice::from_ref(source),
            ClaimOptions::default(),
        )?;
        let tokens = PARTS * PART_BLOCKS * TOKENS_PER_BLOCK;
        claim.fill(Selection::single(0, tokens, blocks))?;
        let mut check = Check::new(&self.engine)?;
        if hold {
            // SAFETY: a live stream; the check keeps it until the claim has ended.
            unsafe { claim.hold_stream(check.stream.raw) }?;
            self.enqueue(&mut check, request)?;
        }
        self.claims.insert(request, (claim, check));
        Ok(())
    }

    fn verify(&mut self, request: u32) -> Result<u64> {
        let (claim, mut check) = self
            .claims
            .remove(&request)
            .ok_or_else(|| Error::new(ErrorKind::Protocol, "a check before its claim"))?;
        claim.arrived().wait(HANDOVER_MAX)?;
        if check.lists.is_empty() {
            self.enqueue(&mut check, request)?;
        }
        check.result()
    }

    fn enqueue(&self, check: &mut Check, request: u32) -> Result<()> {
        for part in 0..PARTS {
            let list = list(&self.engine, &part_blocks(request, part))?;
            for plane in 0..self.model.planes() {
                let blocks = self.model.blocks(plane, &list, PART_BLOCKS)?;
                check
                    .stream
                    .check(blocks, part_seed(request, part, plane), check.count.address)?;
            }
            check.lists.push(list);
        }
        Ok(())
    }

    fn released(&mut self, request: u32) -> Result<()> {
        let offer = self
            .offers
            .remove(&request)
            .ok_or_else(|| Error::new(ErrorKind::Protocol, "a release before its offer"))?;
        offer.released().wait(HANDOVER_MAX).map(drop)?;
        self.stream.wait()?;
        self.lists.clear();
        Ok(())
    }

    fn counters(&self) -> Vec<(String, f64)> {
        let text = self.endpoint.metrics();
        text.lines()
            .filter(|line| line.starts_with("kvxfer_cuda_"))
            .filter_map(|line| {
                let (name, value) = line.rsplit_once(' ')?;
                Some((name.to_owned(), value.parse().ok()?))
            })
            .collect()
    }
}

impl Place {
    fn new(work: &Work, engine: &Arc<Engine>, endpoint: &Endpoint) -> Result<Place> {
        let bytes = work.shape.bytes();
        let mut pools = HashMap::new();
        for kind in [Kind::Host, Kind::Device] {
            let (region, base) = match kind {
                Kind::Host => (crate::memory::Memory::touched(bytes as usize)?.region()?, 0),
                Kind::Device => {
                    let memory = Arc::new(engine.allocate(bytes)?);
                    let base = memory.address;
                    (device_region(endpoint, base, bytes, memory)?, base)
                }
            };
            // SAFETY: the region keeps its memory; blocks are written only while no handle names them.
            let pool = unsafe { endpoint.register(work.shape.layout()?, vec![region.clone()], Role::Both) }?;
            pools.insert(kind, (pool, region, base));
        }
        Ok(Place {
            source: list(engine, &work.source)?,
            destination: list(engine, &work.destination)?,
            work: work.clone(),
            pools,
        })
    }

    fn pool(&self, kind: Kind) -> Result<(&Pool, &Arc<Region>, u64)> {
        self.pools
            .get(&kind)
            .map(|(pool, region, base)| (pool, region, *base))
            .ok_or_else(|| Error::new(ErrorKind::Internal, format!("no pool in {kind:?} memory")))
    }

    fn blocks(&self, base: u64, plane: u32, list: &Memory) -> Blocks {
        Blocks {
            base: base + self.work.shape.offset(plane, 0),
            block_bytes: self.work.shape.block_bytes,
            list: list.address,
            count: (list.bytes / 4) as u32,
        }
    }
}

impl ModelPool {
    fn planes(&self) -> u32 {
        self.layout.planes().len() as u32
    }

    fn block_bytes(&self) -> u64 {
        self.layout.planes().first().map_or(0, |plane| plane.block_length)
    }

    fn address(&self, plane: u32, block: u32) -> Result<u64> {
        let (region, offset) = self.layout.plane_offset(plane as usize, block)?;
        let before: u64 = self.layout.region_lengths().iter().take(region as usize).sum();
        Ok(self.base + before + offset)
    }

    fn blocks(&self, plane: u32, list: &Memory, count: u32) -> Result<Blocks> {
        Ok(Blocks {
            base: self.address(plane, 0)?,
            block_bytes: self.block_bytes(),
            list: list.address,
            count,
        })
    }
}

impl Check {
    fn new(engine: &Arc<Engine>) -> Result<Check> {
        let check = Check {
            stream: engine.stream()?,
            count: engine.allocate(8)?,
            result: engine.pinned(8)?,
            lists: Vec::new(),
        };
        check.stream.set(check.count.address, 0, 8)?;
        Ok(check)
    }

    fn result(&self) -> Result<u64> {
        self.stream.copy(self.result.address, self.count.address, 8)?;
        self.stream.wait()?;
        Ok(self.result.word(0))
    }
}

/// Block ids where kernels can read them.
fn list(engine: &Arc<Engine>, blocks: &[u32]) -> Result<Memory> {
    let list = engine.pinned(blocks.len() as u64 * 4)?;
    for (index, &block) in blocks.iter().enumerate() {
        list.set_u32(index, block);
    }
    Ok(list)
}

fn device_region(endpoint: &Endpoint, address: u64, bytes: u64, memory: Arc<Memory>) -> Result<Arc<Region>> {
    // SAFETY: the memory lives as long as the region, which keeps it, and nobody holds references into it.
    unsafe { endpoint.cuda()?.region(address, bytes, Box::new(memory)) }
}

fn key(request: u32) -> String {
    format!("request-{request}")
}

/// Requests follow each other through the pool: blocks are reused as soon as they may be.
fn request_blocks(request: u32) -> Vec<u32> {
    let size = PARTS * PART_BLOCKS;
    (0..size)
        .map(|block| (request * size + block * 7) % MODEL_BLOCKS)
        .collect()
}

fn part_blocks(request: u32, part: u32) -> Vec<u32> {
    let first = (part * PART_BLOCKS) as usize;
    request_blocks(request)[first..first + PART_BLOCKS as usize].to_vec()
}

fn part_tokens(part: u32) -> std::ops::Range<u32> {
    let tokens = PART_BLOCKS * TOKENS_PER_BLOCK;
    part * tokens..(part + 1) * tokens
}

fn part_seed(request: u32, part: u32, plane: u32) -> u64 {
    plane_seed((u64::from(request) << 16) + u64::from(part), plane)
}

fn plane_seed(seed: u64, plane: u32) -> u64 {
    (seed << 20) ^ (u64::from(plane) + 1).wrapping_mul(0x2545_f491_4f6c_dd1d)
}

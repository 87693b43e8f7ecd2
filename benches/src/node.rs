//! A process of the demonstration: one endpoint with one pool, as a prefill or a decode worker would have it, driven
//! line by line by the parent.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvxfer::{
    Claim, ClaimOptions, Config, Endpoint, EndpointAddress, Offer, OfferOptions, Pool, RankCoordinates, Role,
    Selection, Verdict,
};
use kvxfer_core::layout::{Arrangement, Model, PoolLayout};
use kvxfer_core::memory::Region;
use kvxfer_core::{Error, ErrorKind, Result};
use kvxfer_testkit::pattern::{self, Content};
use serde::{Deserialize, Serialize};

use crate::memory::Memory;
use crate::work::{TOKENS_PER_BLOCK, selection};
use crate::{control, usage};

/// What every byte of a destination holds before.
const POISON_SALT: u64 = 0x5eed;
/// How often the destination is looked at while waiting for its first bytes.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// How a node is set up.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// Its label.
    pub(crate) name: String,
    /// Where it listens.
    pub(crate) listen: SocketAddr,
    /// The model in the form of a presets file, one entry.
    pub(crate) model: String,
    /// Tensor-parallel rank and size.
    pub(crate) tensor: (u16, u16),
    /// Blocks of the pool.
    pub(crate) blocks: u32,
}

/// What a node says after its setup.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Started {
    /// Where and who it is.
    pub(crate) address: EndpointAddress,
    /// Planes of its pool.
    pub(crate) planes: u32,
    /// Bytes of one block in one plane.
    pub(crate) block_bytes: u64,
}

/// What the parent asks of a node.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// First of all.
    Start(Setup),
    /// Source: put a request's bytes into these blocks, and offer them.
    Offer {
        /// The request.
        key: String,
        /// Its blocks.
        blocks: Vec<u32>,
        /// Flip one bit of this block, so that the check has something to find.
        corrupt: Option<u32>,
    },
    /// Source: release the request, chunk by chunk and layer by layer.
    Stream {
        /// The request.
        key: String,
        /// Tokens per chunk.
        chunk: u32,
        /// Layers per part.
        layers: u16,
        /// Chunks to release; all, and the end, if not given.
        chunks: Option<u32>,
    },
    /// Source: wait until the blocks may be reused.
    Released {
        /// The request.
        key: String,
        /// At most so long.
        timeout_ms: u64,
    },
    /// Destination: overwrite blocks with poison.
    Poison {
        /// Which.
        blocks: Vec<u32>,
    },
    /// Destination: claim a request from these sources into these blocks.
    Claim {
        /// The request.
        key: String,
        /// All ranks that hold some of it.
        sources: Vec<EndpointAddress>,
        /// Where to.
        blocks: Vec<u32>,
        /// Pull instead of being pushed to.
        pull: bool,
    },
    /// Destination: wait for the arrival.
    Arrived {
        /// The request.
        key: String,
        /// At most so long.
        timeout_ms: u64,
    },
    /// Destination: cancel the claim as soon as its first bytes have landed, and look what is still missing.
    CancelMidway {
        /// The request.
        key: String,
    },
    /// Destination: wait until the first bytes have landed.
    FirstBytes {
        /// The request.
        key: String,
    },
    /// Destination: check every byte.
    Verify {
        /// The request.
        key: String,
        /// Where it is.
        blocks: Vec<u32>,
    },
    /// Connect to a peer ahead of time.
    Connect {
        /// Whom.
        address: EndpointAddress,
        /// At most so long.
        timeout_ms: u64,
    },
    /// What is known of the path to a peer.
    Explain {
        /// Whom.
        address: EndpointAddress,
    },
}

/// How a handle ended, and when, on the clock that all processes of the machine share.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Ended {
    /// Bytes placed (claims), or members served (offers).
    pub(crate) result: Result<u64, Error>,
    /// When.
    pub(crate) nanos: u64,
}

/// How a claim ended that was cancelled midway.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Midway {
    /// Its end.
    pub(crate) ended: Ended,
    /// From the call to the end.
    pub(crate) cancel_seconds: f64,
    /// Blocks (times planes) that hold the poison still, whole.
    pub(crate) untouched: u64,
    /// Of how many.
    pub(crate) pieces: u64,
}

/// Serves the parent.
pub(crate) fn serve() -> Result<()> {
    let mut node: Option<Node> = None;
    control::serve_parent(|request, channel| {
        let node = match request {
            Request::Start(setup) => {
                return channel.answer(Node::start(&setup).map(|started| {
                    let answer = started.started();
                    node = Some(started);
                    answer
                }));
            }
            _ => node.as_mut(),
        };
        let Some(node) = node else {
            return channel.answer::<()>(Err(Error::new(ErrorKind::Protocol, "a request before Start")));
        };
        match request {
            Request::Start(_) => Ok(()),
            Request::Offer { key, blocks, corrupt } => channel.answer(node.offer(&key, &blocks, corrupt)),
            Request::Stream {
                key,
                chunk,
                layers,
                chunks,
            } => channel.answer(node.stream(&key, chunk, layers, chunks)),
            Request::Released { key, timeout_ms } => channel.answer(node.released(&key, timeout_ms)),
            Request::Poison { blocks } => channel.answer(node.poison(&blocks)),
            Request::Claim {
                key,
                sources,
                blocks,
                pull,
            } => channel.answer(node.claim(&key, &sources, blocks, pull)),
            Request::Arrived { key, timeout_ms } => channel.answer(node.arrived(&key, timeout_ms)),
            Request::CancelMidway { key } => channel.answer(node.cancel_midway(&key)),
            Request::FirstBytes { key } => channel.answer(node.first_bytes(&key)),
            Request::Verify { key, blocks } => channel.answer(node.verify(&key, &blocks)),
            Request::Connect { address, timeout_ms } => {
                channel.answer(node.endpoint.connect(&address, Duration::from_millis(timeout_ms)))
            }
            Request::Explain { address } => channel.answer(Ok(node.endpoint.explain(&address))),
        }
    })?;
    match node {
        Some(node) => node.endpoint.close(Duration::from_secs(2)),
        None => Ok(()),
    }
}

struct Node {
    endpoint: Endpoint,
    pool: Pool,
    layout: Arc<PoolLayout>,
    regions: Vec<Arc<Region>>,
    offers: HashMap<String, (Offer, Vec<u32>)>,
    claims: HashMap<String, (Claim, Vec<u32>)>,
}

impl Node {
    fn start(setup: &Setup) -> Result<Node> {
        let models = Model::from_toml(&setup.model)?;
        let model = models
            .first()
            .ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "a node without a model"))?;
        let (rank, size) = setup.tensor;
        let layout = model.layout(rank, size, TOKENS_PER_BLOCK, setup.blocks, Arrangement::PER_LAYER_NHD)?;
        let regions = layout
            .region_lengths()
            .iter()
            .map(|&length| Memory::touched(length as usize)?.region())
            .collect::<Result<Vec<_>>>()?;
        let endpoint = Endpoint::builder()
            .config(Config::from_env()?)
            .name(&setup.name)
            .listen(setup.listen)
            .transports(["tcp"])
            .rank(RankCoordinates {
                tensor: setup.tensor,
                ..RankCoordinates::default()
            })
            .build()?;
        // SAFETY: the regions keep their mappings alive; this process writes blocks only before they are offered or
        // claimed and after the handle has ended, and otherwise only looks at them through raw copies.
        let pool = unsafe { endpoint.register(layout, regions.clone(), Role::Both) }?;
        Ok(Node {
            layout: Arc::clone(pool.layout()),
            endpoint,
            pool,
            regions,
            offers: HashMap::new(),
            claims: HashMap::new(),
        })
    }

    fn started(&self) -> Started {
        Started {
            address: self.endpoint.address(),
            planes: self.layout.planes().len() as u32,
            block_bytes: self.layout.planes().first().map_or(0, |plane| plane.block_length),
        }
    }

    fn offer(&mut self, key: &str, blocks: &[u32], corrupt: Option<u32>) -> Result<()> {
        let all = self.selection(blocks);
        let tokens = all.groups[0].token_end;
        pattern::fill(
            &self.layout,
            &self.regions,
            &all,
            0..tokens,
            0..u16::MAX,
            Content::new(key.as_bytes(), 0),
        )?;
        if let Some(block) = corrupt {
            let plane = self.layout.planes().len() as u32 / 2;
            let mut byte = [0];
            self.pool.copy_out(plane, block, 100, &mut byte)?;
            self.pool.copy_in(plane, block, 100, &[byte[0] ^ 0x10])?;
        }
        let offer = self.endpoint.offer(key, &self.pool, OfferOptions::default())?;
        self.offers.insert(key.to_owned(), (offer, blocks.to_vec()));
        Ok(())
    }

    fn stream(&mut self, key: &str, chunk: u32, layers: u16, chunks: Option<u32>) -> Result<u64> {
        let (offer, blocks) = self.offers.get(key).ok_or_else(|| unknown(key))?;
        let per_chunk = (chunk / TOKENS_PER_BLOCK).max(1) as usize;
        let all_layers = self.layout.layers().len() as u16;
        let begun = usage::clock_nanos();
        let mut first_token = 0;
        for blocks in blocks.chunks(per_chunk).take(chunks.unwrap_or(u32::MAX) as usize) {
            let token_end = first_token + blocks.len() as u32 * TOKENS_PER_BLOCK;
            offer.append(Selection::single(first_token, token_end, blocks.to_vec()))?;
            let mut layer = 0;
            while layer < all_layers {
                let end = (layer + layers.max(1)).min(all_layers);
                offer.ready(first_token..token_end, layer..end)?;
                layer = end;
            }
            first_token = token_end;
        }
        if chunks.is_none() {
            offer.finish(first_token)?;
        }
        Ok(begun)
    }

    fn released(&mut self, key: &str, timeout_ms: u64) -> Result<Ended> {
        let (offer, _) = self.offers.remove(key).ok_or_else(|| unknown(key))?;
        let ended = offer.released().wait(Duration::from_millis(timeout_ms));
        let nanos = usage::clock_nanos();
        let result = ended.and_then(|release| {
            for member in &release.members {
                match &member.verdict {
                    Verdict::Arrived => {}
                    Verdict::Failed(error) => return Err(error.clone()),
                    Verdict::Unknown => return Err(Error::new(ErrorKind::Unknown, "a member's end")),
                }
            }
            Ok(release.members.len() as u64)
        });
        Ok(Ended { result, nanos })
    }

    fn poison(&self, blocks: &[u32]) -> Result<()> {
        pattern::poison(&self.layout, &self.regions, &self.selection(blocks), POISON_SALT)
    }

    fn claim(&mut self, key: &str, sources: &[EndpointAddress], blocks: Vec<u32>, pull: bool) -> Result<()> {
        let options = ClaimOptions {
            pull,
            ..ClaimOptions::default()
        };
        let claim = self.endpoint.claim(key, &self.pool, sources, options)?;
        claim.fill(self.selection(&blocks))?;
        self.claims.insert(key.to_owned(), (claim, blocks));
        Ok(())
    }

    fn arrived(&mut self, key: &str, timeout_ms: u64) -> Result<Ended> {
        let (claim, _) = self.claims.remove(key).ok_or_else(|| unknown(key))?;
        let result = claim.arrived().wait(Duration::from_millis(timeout_ms));
        Ok(Ended {
            nanos: usage::clock_nanos(),
            result: result.map(|arrival| arrival.bytes),
        })
    }

    fn first_bytes(&self, key: &str) -> Result<bool> {
        let (claim, blocks) = self.claims.get(key).ok_or_else(|| unknown(key))?;
        self.wait_for_bytes(claim, blocks)
    }

    fn cancel_midway(&mut self, key: &str) -> Result<Midway> {
        let (claim, blocks) = self.claims.remove(key).ok_or_else(|| unknown(key))?;
        self.wait_for_bytes(&claim, &blocks)?;
        let begun = Instant::now();
        claim.cancel();
        let result = claim
            .arrived()
            .wait(Duration::from_secs(5))
            .map(|arrival| arrival.bytes);
        let cancel_seconds = begun.elapsed().as_secs_f64();
        let nanos = usage::clock_nanos();
        let (untouched, pieces) = self.untouched(&blocks)?;
        Ok(Midway {
            ended: Ended { result, nanos },
            cancel_seconds,
            untouched,
            pieces,
        })
    }

    fn verify(&self, key: &str, blocks: &[u32]) -> Result<u64> {
        let all = self.selection(blocks);
        let tokens = all.groups[0].token_end;
        let content = Content::new(key.as_bytes(), 0);
        pattern::verify(&self.layout, &self.regions, &all, 0..tokens, 0..u16::MAX, content)
    }

    /// Waits until a block of the first plane has changed or the claim has ended; whether the former.
    fn wait_for_bytes(&self, claim: &Claim, blocks: &[u32]) -> Result<bool> {
        let Some(&block) = blocks.first() else {
            return Ok(false);
        };
        let poisoned = self.poison_block(0)?;
        let mut now = vec![0; 64];
        let deadline = Instant::now() + Duration::from_secs(10);
        while !claim.arrived().is_done() && Instant::now() < deadline {
            self.pool.copy_out(0, block, 0, &mut now)?;
            if now != poisoned[..now.len()] {
                return Ok(true);
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(false)
    }

    /// How many blocks, over all planes, hold nothing but poison; and of how many.
    fn untouched(&self, blocks: &[u32]) -> Result<(u64, u64)> {
        let mut untouched = 0;
        let planes = self.layout.planes().len() as u32;
        for plane in 0..planes {
            let poisoned = self.poison_block(plane)?;
            let mut now = vec![0; poisoned.len()];
            for &block in blocks {
                self.pool.copy_out(plane, block, 0, &mut now)?;
                untouched += u64::from(now == poisoned);
            }
        }
        Ok((untouched, u64::from(planes) * blocks.len() as u64))
    }

    /// A poisoned block of this plane: made once in memory of its own, by the same function.
    fn poison_block(&self, plane: u32) -> Result<Vec<u8>> {
        let found = self.layout.planes().get(plane as usize);
        let length = found.map_or(0, |plane| plane.block_length);
        let one = PoolLayout::opaque(length as u32, 1)?;
        let region = Region::allocate(length)?;
        let all = Selection::single(0, 1, vec![0]);
        pattern::poison(&one, &[Arc::clone(&region)], &all, POISON_SALT)?;
        let mut bytes = vec![0; length as usize];
        region.copy_out(0, &mut bytes)?;
        Ok(bytes)
    }

    fn selection(&self, blocks: &[u32]) -> Selection {
        selection(&self.layout, blocks)
    }
}

fn unknown(key: &str) -> Error {
    Error::new(ErrorKind::NotOffered, format!("request {key}"))
        .at("a node of the demonstration")
        .because("it was not offered or claimed here, or has ended")
}

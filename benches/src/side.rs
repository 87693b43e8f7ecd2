//! One of the two processes of `run` and `figures`: its endpoint, its memory, and what the target answers.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvxfer::{
    Claim, ClaimOptions, Endpoint, EndpointAddress, Grant, GrantHandle, GrantOptions, Pool, PushOptions, Role,
    Selection, Transfer,
};
use kvxfer_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::control::Channel;
use crate::memory::Memory;
use crate::way::Way;
use crate::work::Work;
use crate::{perftest, raw, stamps, usage};

/// How long one transfer may take on a loaded machine.
pub(crate) const TRANSFER_MAX: Duration = Duration::from_secs(60);
/// Seeds of the source patterns, by who holds the source.
const INITIATOR_SEED: u64 = 11;
const TARGET_SEED: u64 = 29;

/// What moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mover {
    /// The library, initiator writes.
    Push,
    /// The library, initiator reads.
    Pull,
    /// Plain sockets, initiator writes.
    RawPut,
    /// Plain sockets, initiator reads.
    RawGet,
    /// perftest, initiator writes.
    IbWrite,
    /// perftest, initiator reads.
    IbRead,
}

impl Mover {
    /// Which way the bytes go.
    pub(crate) fn flow(self) -> Flow {
        match self {
            Mover::Push | Mover::RawPut | Mover::IbWrite => Flow::Out,
            Mover::Pull | Mover::RawGet | Mover::IbRead => Flow::In,
        }
    }

    /// Whether it is plain sockets.
    pub(crate) fn is_raw(self) -> bool {
        matches!(self, Mover::RawPut | Mover::RawGet)
    }

    /// Which of perftest's programs it is, if it is one.
    pub(crate) fn perftest(self) -> Option<perftest::Program> {
        match self {
            Mover::IbWrite => Some(perftest::Program::Write),
            Mover::IbRead => Some(perftest::Program::Read),
            _ => None,
        }
    }

    /// Whether it is the library and not a baseline.
    pub(crate) fn is_kvxfer(self) -> bool {
        matches!(self, Mover::Push | Mover::Pull)
    }
}

/// Which way the bytes go, seen from the initiator. Each way has its own memory on both sides, so that pushes and
/// pulls can be interleaved and both be checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Flow {
    /// From the initiator to the target.
    Out,
    /// From the target to the initiator.
    In,
}

/// How a side is set up.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// Bytes of each pool.
    pub(crate) pool_bytes: u64,
    /// If set, each pool is a repetition of so many bytes.
    pub(crate) window_bytes: Option<u64>,
    /// Ways that are used.
    pub(crate) flows: Vec<Flow>,
    /// How the initiator reaches the target.
    pub(crate) ours: Way,
    /// And the target the initiator.
    pub(crate) theirs: Way,
    /// Where the target listens.
    pub(crate) listen: IpAddr,
    /// Let the library work beyond loopback without authentication.
    pub(crate) insecure: bool,
    /// Also set up the baseline.
    pub(crate) raw: bool,
}

/// What the target says after its setup.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Started {
    /// Version of the program.
    pub(crate) version: String,
    /// The endpoint's address.
    pub(crate) address: EndpointAddress,
    /// The baseline's.
    pub(crate) raw: Option<SocketAddr>,
    /// What building the endpoint cost.
    pub(crate) build: BuildCost,
}

/// What building an endpoint cost.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct BuildCost {
    /// Time of `build`, in seconds.
    pub(crate) seconds: f64,
    /// Resident memory before it.
    pub(crate) resident_before: u64,
    /// Resident memory after it.
    pub(crate) resident_after: u64,
}

/// What the initiator asks of the target.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// First of all.
    Start(Setup),
    /// The baseline's streams come now.
    AcceptRaw,
    /// The next workload: fill the sources, poison the destinations.
    Work {
        /// What.
        work: Work,
        /// Which ways.
        flows: Vec<Flow>,
    },
    /// The next repetition.
    Prepare {
        /// By what.
        mover: Mover,
        /// Its number.
        epoch: u64,
    },
    /// The clock starts now.
    Mark,
    /// The initiator was told of completion.
    End {
        /// By what.
        mover: Mover,
        /// Its number.
        epoch: u64,
    },
    /// Check every byte of the pool that received.
    CheckEverything {
        /// Last repetition of that way.
        epoch: u64,
    },
    /// Grants for so many round trips; the initiator's for the way back.
    PingGrants {
        /// Its grants.
        theirs: Vec<Grant>,
    },
    /// Answer the pings of the last grants.
    Pong,
    /// Claim blocks under a key, push.
    Claim {
        /// The key.
        key: String,
        /// First block, and how many.
        blocks: (u32, u32),
        /// The offering endpoint.
        source: EndpointAddress,
    },
    /// Wait for the claim's end.
    ClaimEnd {
        /// The key.
        key: String,
    },
    /// Start perftest's server; the answer is its port.
    IbServe(perftest::Run),
    /// Wait for that server's end.
    IbEnd,
    /// Sleep and say what that cost.
    Idle {
        /// How long.
        seconds: f64,
    },
}

/// What the target found after a repetition.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct RepEnd {
    /// Its processor time since the mark, in seconds.
    pub(crate) cpu_seconds: f64,
    /// The bytes were there, in the end.
    pub(crate) arrived: bool,
    /// They were not there yet when the initiator was told of completion.
    pub(crate) late: bool,
    /// Highest resident memory since the mark.
    pub(crate) resident_peak: u64,
}

/// One side's endpoint and memory.
pub(crate) struct Side {
    pub(crate) endpoint: Endpoint,
    pub(crate) build: BuildCost,
    memories: HashMap<Flow, Arc<Memory>>,
    pools: HashMap<Flow, Pool>,
    /// Whether each byte of a pool has a place of its own, so that stamps can be told apart.
    pub(crate) is_distinct: bool,
    pub(crate) work: Option<Arc<Selections>>,
}

/// A workload with its block lists in the library's form.
pub(crate) struct Selections {
    pub(crate) work: Work,
    pub(crate) source: Selection,
    pub(crate) destination: Selection,
}

impl Side {
    /// Memory first, touched, so that what the endpoint needs can be told from it.
    pub(crate) fn start(name: &str, way: &Way, setup: &Setup) -> Result<Side> {
        let mut memories = HashMap::new();
        for flow in &setup.flows {
            let bytes = setup.pool_bytes as usize;
            let memory = match setup.window_bytes {
                Some(window) => Memory::repeating(bytes, window as usize)?,
                None => Memory::touched(bytes)?,
            };
            memories.insert(*flow, memory);
        }
        let resident_before = usage::resident_bytes()?;
        let begun = Instant::now();
        let endpoint = way.endpoint(name, setup.listen, setup.insecure)?;
        let seconds = begun.elapsed().as_secs_f64();
        Ok(Side {
            endpoint,
            build: BuildCost {
                seconds,
                resident_before,
                resident_after: usage::resident_bytes()?,
            },
            memories,
            pools: HashMap::new(),
            is_distinct: setup.window_bytes.is_none(),
            work: None,
        })
    }

    /// Takes the next workload: registers pools of its shape over the same memory.
    pub(crate) fn take(&mut self, work: &Work, flows: &[Flow], is_initiator: bool) -> Result<()> {
        for (_, pool) in self.pools.drain() {
            pool.close_wait(Duration::from_secs(5))?;
        }
        let layout = work.shape.layout()?;
        for flow in flows {
            let memory = self.memory(*flow)?;
            if (memory.length() as u64) < work.shape.bytes() {
                return Err(
                    Error::new(ErrorKind::InvalidArgument, format!("workload {}", work.name)).because(format!(
                        "it needs {} bytes, the pool has {}",
                        work.shape.bytes(),
                        memory.length()
                    )),
                );
            }
            let is_source = is_initiator == (*flow == Flow::Out);
            match is_source {
                true => stamps::fill(memory, source_seed(*flow)),
                false => stamps::poison(memory),
            }
            // SAFETY: the region keeps its mapping alive, and this crate touches blocks only before a transfer begins and
            // after its end was reported, except to look whether stamps came too late, by volatile reads.
            let pool = unsafe {
                self.endpoint
                    .register(layout.clone(), vec![memory.region()?], Role::Both)
            }?;
            self.pools.insert(*flow, pool);
        }
        self.work = Some(Arc::new(Selections {
            source: work.source_selection(&layout),
            destination: work.destination_selection(&layout),
            work: work.clone(),
        }));
        Ok(())
    }

    /// The memory of a way.
    pub(crate) fn memory(&self, flow: Flow) -> Result<&Arc<Memory>> {
        self.memories.get(&flow).ok_or_else(|| out_of_order("memory"))
    }

    /// The pool of a way.
    pub(crate) fn pool(&self, flow: Flow) -> Result<&Pool> {
        self.pools.get(&flow).ok_or_else(|| out_of_order("a pool"))
    }

    /// The current workload.
    pub(crate) fn selections(&self) -> Result<Arc<Selections>> {
        self.work.clone().ok_or_else(|| out_of_order("a workload"))
    }

    /// The memory for the baseline: of the ways that are used, twice the same if only one is.
    pub(crate) fn raw_pools(&self) -> Result<raw::Pools> {
        let any = |first: Flow, second: Flow| self.memory(first).or_else(|_| self.memory(second)).cloned();
        Ok(raw::Pools {
            put: any(Flow::Out, Flow::In)?,
            get: any(Flow::In, Flow::Out)?,
        })
    }

    /// Checks every byte of the way's receiving pool.
    pub(crate) fn check_everything(&self, flow: Flow, epoch: u64) -> Result<()> {
        let selections = self.selections()?;
        stamps::check_everything(self.memory(flow)?, &selections.work, epoch, source_seed(flow))
    }

    /// Grants for so many pings into distinct blocks.
    pub(crate) fn ping_grants(&self, count: usize) -> Result<Vec<GrantHandle>> {
        let selections = self.selections()?;
        let pool = self.pool(Flow::Out)?;
        selections.work.destination[..count.min(selections.work.destination.len())]
            .iter()
            .map(|&block| {
                let target = crate::work::selection(pool.layout(), &[block]);
                pool.grant(target, GrantOptions::default())
            })
            .collect()
    }

    /// Pushes ping `index` with a message.
    pub(crate) fn push_ping(
        &self,
        selections: &Selections,
        index: usize,
        number: u64,
        grant: &Grant,
    ) -> Result<Transfer> {
        let work = &selections.work;
        let block = work.source[index];
        let memory = self.memory(Flow::Out)?;
        raw::mark(memory, work.shape.offset(0, block), work.shape.block_bytes, number);
        let pool = self.pool(Flow::Out)?;
        let options = PushOptions {
            message: Some(Arc::from(number.to_le_bytes())),
            ..PushOptions::default()
        };
        let source = crate::work::selection(pool.layout(), &[block]);
        self.endpoint.push(pool, source, grant, options)
    }

    /// Waits for ping `index`; gives back its number.
    pub(crate) fn await_ping(&self, selections: &Selections, index: usize, handle: &GrantHandle) -> Result<u64> {
        let arrival = handle.arrived().wait(TRANSFER_MAX)?;
        let work = &selections.work;
        let torn = |why: &str| {
            Error::new(
                ErrorKind::Corrupt,
                format!("ping into block {}", work.destination[index]),
            )
            .because(why)
        };
        let message = arrival
            .message
            .as_deref()
            .ok_or_else(|| torn("it came without its message"))?;
        let number = u64::from_le_bytes(message.try_into().map_err(|_| torn("its message has another length"))?);
        let offset = work.shape.offset(0, work.destination[index]);
        if raw::is_marked(self.memory(Flow::Out)?, offset, work.shape.block_bytes, number) {
            Ok(number)
        } else {
            Err(torn("the block does not hold the number that the message says"))
        }
    }
}

fn source_seed(flow: Flow) -> u64 {
    match flow {
        Flow::Out => INITIATOR_SEED,
        Flow::In => TARGET_SEED,
    }
}

fn out_of_order(what: &str) -> Error {
    Error::new(ErrorKind::Protocol, format!("{what} was asked for before it was there"))
        .at("kvxfer-bench")
        .remedy("run the same version of kvxfer-bench on both sides")
}

/// What the target keeps between requests.
#[derive(Default)]
pub(crate) struct Target {
    side: Option<Side>,
    listener: Option<raw::Listener>,
    server: Option<raw::Server>,
    handles: HashMap<&'static str, GrantHandle>,
    pings: Vec<(GrantHandle, Grant)>,
    claims: HashMap<String, Claim>,
    marked: Duration,
    ib_device: Option<String>,
    ib_server: Option<perftest::Process>,
}

const WRITTEN: &str = "written";
const READ: &str = "read";

impl Target {
    /// Serves one request.
    pub(crate) fn handle(&mut self, request: Request, channel: &mut Channel) -> Result<()> {
        match request {
            Request::Start(setup) => channel.answer(self.start(&setup)),
            Request::AcceptRaw => {
                let accepted = self.accept_raw();
                channel.answer(accepted)
            }
            Request::Work { work, flows } => {
                self.handles.clear();
                let taken = self.side().and_then(|side| side.take(&work, &flows, false));
                channel.answer(taken)
            }
            Request::Prepare { mover, epoch } => channel.answer(self.prepare(mover, epoch)),
            Request::Mark => {
                usage::reset_resident_peak();
                let sent = channel.answer(Ok(()));
                self.marked = usage::processor_time();
                sent
            }
            Request::End { mover, epoch } => {
                let cpu = usage::processor_time() - self.marked;
                channel.answer(self.end(mover, epoch, cpu))
            }
            Request::CheckEverything { epoch } => {
                let checked = self.side().and_then(|side| side.check_everything(Flow::Out, epoch));
                channel.answer(checked)
            }
            Request::PingGrants { theirs } => channel.answer(self.ping_grants(theirs)),
            Request::Pong => {
                // Says that it is there first: the pings come right after.
                channel.answer(Ok(()))?;
                channel.answer(self.pong())
            }
            Request::Claim { key, blocks, source } => channel.answer(self.claim(key, blocks, source)),
            Request::ClaimEnd { key } => channel.answer(self.claim_end(&key)),
            Request::IbServe(run) => channel.answer(self.ib_serve(&run)),
            Request::IbEnd => {
                let server = self.ib_server.take().ok_or_else(|| out_of_order("perftest"));
                channel.answer(server.and_then(perftest::Process::finish).map(drop))
            }
            Request::Idle { seconds } => channel.answer(usage::idle(seconds)),
        }
    }

    /// Ends the baseline and the endpoint.
    pub(crate) fn finish(self) -> Result<()> {
        if let Some(server) = self.server {
            server.join()?;
        }
        drop((self.handles, self.pings, self.claims));
        match self.side {
            Some(side) => {
                drop(side.pools);
                side.endpoint.close(Duration::from_secs(2))
            }
            None => Ok(()),
        }
    }

    fn side(&mut self) -> Result<&mut Side> {
        self.side.as_mut().ok_or_else(|| out_of_order("an endpoint"))
    }

    fn start(&mut self, setup: &Setup) -> Result<Started> {
        let side = Side::start("target", &setup.theirs, setup)?;
        let listener = match setup.raw {
            true => Some(raw::Listener::bind(SocketAddr::new(setup.listen, 0))?),
            false => None,
        };
        let started = Started {
            version: env!("CARGO_PKG_VERSION").into(),
            address: side.endpoint.address(),
            raw: listener.as_ref().map(raw::Listener::address).transpose()?,
            build: side.build,
        };
        (self.side, self.listener) = (Some(side), listener);
        self.ib_device = setup.theirs.devices.first().cloned();
        Ok(started)
    }

    fn accept_raw(&mut self) -> Result<()> {
        let pools = self.side()?.raw_pools()?;
        let listener = self.listener.as_ref().ok_or_else(|| out_of_order("the baseline"))?;
        self.server = Some(listener.serve(&pools)?);
        Ok(())
    }

    fn prepare(&mut self, mover: Mover, epoch: u64) -> Result<Option<Grant>> {
        let side = self.side.as_ref().ok_or_else(|| out_of_order("an endpoint"))?;
        let selections = side.selections()?;
        if mover.flow() == Flow::In && side.is_distinct {
            stamps::stamp(side.memory(Flow::In)?, &selections.work, epoch);
        }
        let handle = match mover {
            Mover::Push => side
                .pool(Flow::Out)?
                .grant(selections.destination.clone(), GrantOptions::default())?,
            Mover::Pull => side
                .pool(Flow::In)?
                .serve(selections.source.clone(), GrantOptions::default())?,
            _ => return Ok(None),
        };
        let grant = handle.grant().clone();
        self.handles
            .insert(if mover == Mover::Push { WRITTEN } else { READ }, handle);
        Ok(Some(grant))
    }

    fn end(&mut self, mover: Mover, epoch: u64, cpu: Duration) -> Result<RepEnd> {
        // Read before the checks, which are the benchmark's own.
        let resident_peak = usage::resident_peak_bytes()?;
        let side = self.side.as_ref().ok_or_else(|| out_of_order("an endpoint"))?;
        let (mut arrived, mut late) = (true, false);
        if mover.flow() == Flow::Out && side.is_distinct {
            let selections = side.selections()?;
            let memory = side.memory(Flow::Out)?;
            (arrived, late) = stamps_in_time(memory, &selections.work, epoch);
        }
        let handle = match mover {
            Mover::Push => self.handles.remove(WRITTEN),
            Mover::Pull => self.handles.remove(READ),
            _ => None,
        };
        if let Some(handle) = handle {
            handle.arrived().wait(Duration::from_secs(10))?;
        }
        Ok(RepEnd {
            cpu_seconds: cpu.as_secs_f64(),
            arrived,
            late,
            resident_peak,
        })
    }

    fn ib_serve(&mut self, run: &perftest::Run) -> Result<u16> {
        run.program.check()?;
        let device = self.ib_device.as_ref().ok_or_else(|| out_of_order("a device"))?;
        let server = self.ib_server.insert(run.serve(device)?);
        Ok(server.port())
    }

    fn ping_grants(&mut self, theirs: Vec<Grant>) -> Result<Vec<Grant>> {
        let handles = self.side()?.ping_grants(theirs.len())?;
        let grants = handles.iter().map(|handle| handle.grant().clone()).collect();
        self.pings = handles.into_iter().zip(theirs).collect();
        Ok(grants)
    }

    fn pong(&mut self) -> Result<()> {
        let pings = std::mem::take(&mut self.pings);
        let side = self.side()?;
        let selections = side.selections()?;
        let mut transfers = Vec::with_capacity(pings.len());
        for (index, (handle, grant)) in pings.iter().enumerate() {
            let number = side.await_ping(&selections, index, handle)?;
            transfers.push(side.push_ping(&selections, index, number + raw::PONG_MARK, grant)?);
        }
        transfers
            .iter()
            .try_for_each(|transfer| transfer.done().wait(TRANSFER_MAX).map(drop))
    }

    fn claim(&mut self, key: String, (first, count): (u32, u32), source: EndpointAddress) -> Result<()> {
        let side = self.side()?;
        let pool = side.pool(Flow::Out)?;
        let claim = side.endpoint.claim(&key, pool, &[source], ClaimOptions::default())?;
        let blocks: Vec<u32> = (first..first + count).collect();
        claim.fill(crate::work::selection(pool.layout(), &blocks))?;
        self.claims.insert(key, claim);
        Ok(())
    }

    fn claim_end(&mut self, key: &str) -> Result<u64> {
        let claim = self.claims.remove(key).ok_or_else(|| out_of_order("a claim"))?;
        Ok(claim.arrived().wait(TRANSFER_MAX)?.bytes)
    }
}

/// Whether the stamps are there at once, or at least within ten seconds.
pub(crate) fn stamps_in_time(memory: &Memory, work: &Work, epoch: u64) -> (bool, bool) {
    if stamps::stamps_are_there(memory, work, epoch) {
        return (true, false);
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        if stamps::stamps_are_there(memory, work, epoch) {
            return (true, true);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    (false, true)
}

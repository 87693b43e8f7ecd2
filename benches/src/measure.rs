//! The initiator's part of `run` and `figures`: movers interleaved in the same run, between the same two processes and
//! pools.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use kvxfer::{PullOptions, PushOptions};
use kvxfer_core::{Error, ErrorKind, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::control::{Channel, Child};
use crate::measured::{CLEAN_MIN, Measured, Rep};
use crate::side::{Flow, Mover, RepEnd, Request, Selections, Setup, Side, Started, TRANSFER_MAX, stamps_in_time};
use crate::statistics::rounded;
use crate::usage::{self, Idle, Quiet};
use crate::way::Way;
use crate::work::Work;
use crate::{perftest, raw, stamps, terminal};

/// How long the target may take for an answer, checks of a whole pool included.
const ANSWER_MAX: Duration = Duration::from_secs(180);
/// Time for the first connection.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// Round trips per grant exchange of the ping-pong.
const PINGS_PER_BATCH: usize = 128;
/// Grant exchanges per round: long enough that the scheduler settles on where the two threads run.
const BATCHES_PER_ROUND: usize = 8;

/// The target: a child of ours or a `serve` elsewhere.
pub(crate) enum Other {
    /// On this machine.
    Child(Child),
    /// On another.
    Remote(Channel),
}

impl Other {
    fn ask<T: DeserializeOwned>(&mut self, request: &Request) -> Result<T> {
        match self {
            Other::Child(child) => child.ask(request, ANSWER_MAX),
            Other::Remote(channel) => channel.ask(request, ANSWER_MAX),
        }
    }

    fn answered<T: DeserializeOwned>(&mut self) -> Result<T> {
        match self {
            Other::Child(child) => child.answered(ANSWER_MAX),
            Other::Remote(channel) => channel.answered(ANSWER_MAX),
        }
    }
}

/// How to measure.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// Timed repetitions; the workload's own number if not given.
    pub(crate) reps: Option<u32>,
    /// Repetitions before those.
    pub(crate) warm: Option<u32>,
    /// Check stamps each repetition, and every byte at the end.
    pub(crate) verify: bool,
    /// How long to wait in all, per workload, for others to stop computing.
    pub(crate) patience: Duration,
    /// Show a progress bar.
    pub(crate) progress: bool,
    /// Wait for a line on standard input before each repetition, and print it at once.
    pub(crate) paced: bool,
}

/// A connected pair of processes.
pub(crate) struct Bench {
    pub(crate) side: Side,
    pub(crate) target: Started,
    pub(crate) connect: Duration,
    other: Other,
    streams: Option<raw::Streams>,
    listen: IpAddr,
}

/// A repetition as it is printed when it was waited for.
#[derive(Serialize)]
struct Paced<'a> {
    workload: &'a str,
    timed: bool,
    seconds: f64,
    post_us: f64,
    post_cpu_us: f64,
    disturbed: bool,
}

impl Bench {
    /// Starts the target as a child, or takes a connected one, and connects endpoints and baseline.
    pub(crate) fn start(mut other: Other, setup: &Setup) -> Result<Bench> {
        let target: Started = other.ask(&Request::Start(setup.clone()))?;
        if target.version != env!("CARGO_PKG_VERSION") {
            return Err(Error::new(ErrorKind::Unsupported, "the other side's kvxfer-bench")
                .because(format!(
                    "it is {}, this is {}",
                    target.version,
                    env!("CARGO_PKG_VERSION")
                ))
                .remedy("run the same version on both sides"));
        }
        let side = Side::start("initiator", &setup.ours, setup)?;
        let begun = Instant::now();
        side.endpoint.connect(&target.address, CONNECT_MAX)?;
        let connect = begun.elapsed();
        let mut bench = Bench {
            side,
            target,
            connect,
            other,
            streams: None,
            listen: setup.listen,
        };
        if let Some(address) = bench.target.raw {
            // The kernel completes connections before they are accepted, so one thread can do both ends in turn.
            let streams = raw::Streams::connect(address, &bench.side.raw_pools()?)?;
            bench.other.ask::<()>(&Request::AcceptRaw)?;
            bench.streams = Some(streams);
        }
        Ok(bench)
    }

    /// A child process as the target.
    pub(crate) fn with_child(setup: &Setup) -> Result<Bench> {
        Bench::start(Other::Child(Child::start("target", &["peer", "target"])?), setup)
    }

    /// Measures movers in turn: A B A B ….
    pub(crate) fn measure(&mut self, work: &Work, movers: &[Mover], plan: &Plan) -> Result<Vec<Measured>> {
        let flows = flows(movers);
        self.other.ask::<()>(&Request::Work {
            work: work.clone(),
            flows: flows.clone(),
        })?;
        self.side.take(work, &flows, true)?;
        let depth = self.side.endpoint.config().rdma.queue_depth;
        let mut measured: Vec<Measured> = movers.iter().map(|&mover| Measured::new(mover)).collect();
        let (reps, warm) = (plan.reps.unwrap_or(work.reps), plan.warm.unwrap_or(work.warm));
        let bar = plan
            .progress
            .then(|| terminal::progress(u64::from(reps + warm) * movers.len() as u64, &work.name));
        let mut quiet = Quiet::new(plan.patience);
        let mut last_epoch = HashMap::new();
        let mut epoch = 0;
        let mut rep = 0;
        // Disturbed repetitions are made up for, within reason.
        while rep < reps + warm
            || (rep < 2 * reps + warm
                && !quiet.exhausted()
                && measured.iter().any(|m| m.clean() < CLEAN_MIN.min(reps as usize)))
        {
            for outcome in &mut measured {
                epoch += 1;
                let timed = rep >= warm;
                if work.ping_pong {
                    let round = self.ping_round(outcome.mover, timed.then_some(&mut quiet))?;
                    if timed {
                        outcome.rounds.push(round);
                    }
                } else if let Some(program) = outcome.mover.perftest() {
                    let done = self.perftest(&perftest::Run::of(program, work, depth), work.bytes())?;
                    if timed {
                        outcome.reps.push(done);
                    }
                } else {
                    last_epoch.insert(outcome.mover.flow(), epoch);
                    if plan.paced {
                        terminal::line_from_input()?;
                    }
                    let done = self.repetition(outcome, epoch, timed.then_some(&mut quiet), plan.verify)?;
                    if plan.paced {
                        terminal::json_line(&Paced {
                            workload: &work.name,
                            timed,
                            seconds: done.seconds,
                            post_us: rounded(1e6 * done.post_seconds, 2),
                            post_cpu_us: rounded(1e6 * done.post_cpu_seconds, 2),
                            disturbed: done.disturbed,
                        })?;
                    }
                    if timed {
                        outcome.reps.push(done);
                    }
                }
                if let Some(bar) = &bar {
                    bar.inc(1);
                }
            }
            rep += 1;
            if work.ping_pong && rep == reps + warm {
                break;
            }
        }
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
        if plan.verify && !work.ping_pong {
            self.check(&last_epoch, &mut measured)?;
        }
        Ok(measured)
    }

    /// Puts 20 MB behind 5 GB, or alone: seconds until the small hand-off's blocks are released.
    pub(crate) fn hand_off(&mut self, key: &str, blocks: (u32, u32)) -> Result<HandOff<'_>> {
        let source = self.side.endpoint.address();
        self.other.ask::<()>(&Request::Claim {
            key: key.into(),
            blocks,
            source,
        })?;
        Ok(HandOff {
            bench: self,
            key: key.into(),
            blocks,
        })
    }

    /// Waits for the target's claim.
    pub(crate) fn claim_end(&mut self, key: &str) -> Result<u64> {
        self.other.ask(&Request::ClaimEnd { key: key.into() })
    }

    /// Takes a workload without measuring: for hand-offs by hand.
    pub(crate) fn take(&mut self, work: &Work) -> Result<()> {
        self.other.ask::<()>(&Request::Work {
            work: work.clone(),
            flows: vec![Flow::Out],
        })?;
        self.side.take(work, &[Flow::Out], true)
    }

    /// What the two sides cost while idle with their session open: initiator, target.
    pub(crate) fn idle(&mut self, seconds: f64) -> Result<(Idle, Idle)> {
        let target = self.other.ask(&Request::Idle { seconds })?;
        Ok((usage::idle(seconds)?, target))
    }

    /// The transport taken, by name.
    pub(crate) fn transport(&self) -> Option<String> {
        let peers = self.side.endpoint.peers();
        let target = peers
            .iter()
            .find(|peer| Some(peer.incarnation) == self.target.address.incarnation);
        target.and_then(|peer| peer.transport.clone())
    }

    /// The way taken, for people.
    pub(crate) fn path(&self) -> String {
        let explained = self.side.endpoint.explain(&self.target.address);
        terminal::path_of(&explained).join("\n")
    }

    /// Ends both sides.
    pub(crate) fn finish(self) -> Result<()> {
        if let Some(streams) = &self.streams {
            streams.stop()?;
        }
        self.side.endpoint.close(Duration::from_secs(2))
    }

    fn repetition(
        &mut self,
        outcome: &mut Measured,
        epoch: u64,
        quiet: Option<&mut Quiet>,
        verify: bool,
    ) -> Result<Rep> {
        let mover = outcome.mover;
        let selections = self.side.selections()?;
        let work = &selections.work;
        if mover.flow() == Flow::Out && self.side.is_distinct {
            stamps::stamp(self.side.memory(Flow::Out)?, work, epoch);
        }
        let (ours, theirs) = match mover {
            Mover::RawPut => (work.source_offsets(), work.destination_offsets()),
            Mover::RawGet => (work.destination_offsets(), work.source_offsets()),
            _ => (Vec::new(), Vec::new()),
        };
        let grant: Option<kvxfer::Grant> = self.other.ask(&Request::Prepare { mover, epoch })?;
        if let Some(quiet) = quiet {
            quiet.wait();
        }
        usage::reset_resident_peak();
        self.other.ask::<()>(&Request::Mark)?;
        let busy = usage::busy_seconds();
        let (cpu, begun) = (usage::processor_time(), Instant::now());
        let post = match (&grant, mover) {
            (Some(grant), Mover::Push) => self.push(&selections, grant)?,
            (Some(grant), Mover::Pull) => self.pull(&selections, grant)?,
            _ => {
                let streams = self.streams.as_ref().ok_or_else(no_baseline)?;
                match mover {
                    Mover::RawPut => streams.put(&ours, &theirs, work.shape.block_bytes)?,
                    _ => streams.get(&ours, &theirs, work.shape.block_bytes)?,
                }
                Post::default()
            }
        };
        let window = begun.elapsed();
        let cpu = usage::processor_time() - cpu;
        let end: RepEnd = self.other.ask(&Request::End { mover, epoch })?;
        let peak = usage::resident_peak_bytes()?;
        outcome.resident_peak.0 = outcome.resident_peak.0.max(peak);
        outcome.resident_peak.1 = outcome.resident_peak.1.max(end.resident_peak);
        let busy = usage::busy_seconds() - busy;
        let (mut arrived, mut late) = (end.arrived, end.late);
        if mover.flow() == Flow::In && verify {
            (arrived, late) = stamps_in_time(self.side.memory(Flow::In)?, work, epoch);
        }
        Ok(Rep {
            seconds: window.as_secs_f64(),
            post_seconds: post.wall.as_secs_f64(),
            post_cpu_seconds: post.cpu.as_secs_f64(),
            cpu_initiator: cpu.as_secs_f64(),
            cpu_target: end.cpu_seconds,
            disturbed: usage::disturbed(busy, cpu + Duration::from_secs_f64(end.cpu_seconds), window),
            late,
            arrived,
        })
    }

    /// One run of perftest, of as many bytes, between the same devices.
    fn perftest(&mut self, run: &perftest::Run, bytes: u64) -> Result<Rep> {
        let device = self.side.endpoint.config().devices.first().cloned();
        let device = device.ok_or_else(no_baseline)?;
        let mut rate = None;
        for _ in 0..perftest::ATTEMPTS_MAX {
            let port: u16 = self.other.ask(&Request::IbServe(run.clone()))?;
            rate = run.measure(&device, self.listen, port)?;
            self.other.ask::<()>(&Request::IbEnd)?;
            if rate.is_some() {
                break;
            }
        }
        let rate = rate.ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "a rate from perftest")
                .because("it could not tell the rate of the processor's clock, many times over")
                .remedy("measure on a machine that is less loaded")
        })?;
        Ok(Rep {
            seconds: bytes as f64 / rate,
            post_seconds: 0.0,
            post_cpu_seconds: 0.0,
            cpu_initiator: 0.0,
            cpu_target: 0.0,
            disturbed: false,
            late: false,
            arrived: true,
        })
    }

    fn push(&self, selections: &Selections, grant: &kvxfer::Grant) -> Result<Post> {
        // The caller's own list, which it gives away.
        let source = selections.source.clone();
        let pool = self.side.pool(Flow::Out)?;
        let begun = Post::begin();
        let transfer = self.side.endpoint.push(pool, source, grant, PushOptions::default())?;
        let post = begun.end();
        transfer.done().wait(TRANSFER_MAX)?;
        Ok(post)
    }

    fn pull(&self, selections: &Selections, grant: &kvxfer::Grant) -> Result<Post> {
        let destination = selections.destination.clone();
        let pool = self.side.pool(Flow::In)?;
        let begun = Post::begin();
        let transfer = self
            .side
            .endpoint
            .pull(grant, pool, destination, PullOptions::default())?;
        let post = begun.end();
        transfer.done().wait(TRANSFER_MAX)?;
        Ok(post)
    }

    /// One round of round trips, seconds each.
    fn ping_round(&mut self, mover: Mover, quiet: Option<&mut Quiet>) -> Result<Vec<f64>> {
        if let Some(quiet) = quiet {
            quiet.wait();
        }
        let selections = self.side.selections()?;
        let mut times = Vec::with_capacity(PINGS_PER_BATCH * BATCHES_PER_ROUND);
        for _ in 0..BATCHES_PER_ROUND {
            if mover.is_kvxfer() {
                self.ping_batch(&selections, &mut times)?;
            } else {
                self.raw_ping_batch(&selections.work, &mut times)?;
            }
        }
        Ok(times)
    }

    fn raw_ping_batch(&self, work: &Work, times: &mut Vec<f64>) -> Result<()> {
        let at = |block: u32| work.shape.offset(0, block);
        let streams = self.streams.as_ref().ok_or_else(no_baseline)?;
        // The pong comes from the target's last block into our source block, whose mark then changes.
        let batch = streams.ping(
            at(work.source[0]),
            at(work.destination[0]),
            work.shape.block_bytes,
            PINGS_PER_BATCH as u32,
        )?;
        times.extend(batch.into_iter().map(|time| time.as_secs_f64()));
        Ok(())
    }

    fn ping_batch(&mut self, selections: &Selections, times: &mut Vec<f64>) -> Result<()> {
        let handles = self.side.ping_grants(PINGS_PER_BATCH)?;
        let ours = handles.iter().map(|handle| handle.grant().clone()).collect();
        let theirs: Vec<kvxfer::Grant> = self.other.ask(&Request::PingGrants { theirs: ours })?;
        self.other.ask::<()>(&Request::Pong)?;
        let mut transfers = Vec::with_capacity(handles.len());
        for (index, (handle, grant)) in handles.iter().zip(&theirs).enumerate() {
            let number = index as u64;
            let begun = Instant::now();
            transfers.push(self.side.push_ping(selections, index, number, grant)?);
            let answer = self.side.await_ping(selections, index, handle)?;
            times.push(begun.elapsed().as_secs_f64());
            if answer != number + raw::PONG_MARK {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format!("ping {number} was answered as {answer}"),
                ));
            }
        }
        for transfer in &transfers {
            transfer.done().wait(TRANSFER_MAX)?;
        }
        self.other.answered::<()>()
    }

    /// Checks every byte of each way's receiving pool, once, and notes it at all movers of that way.
    fn check(&mut self, last_epoch: &HashMap<Flow, u64>, measured: &mut [Measured]) -> Result<()> {
        for (&flow, &epoch) in last_epoch {
            let checked = match flow {
                Flow::Out => self.other.ask(&Request::CheckEverything { epoch }),
                Flow::In => self.side.check_everything(flow, epoch),
            };
            if let Err(error) = &checked
                && error.kind() != ErrorKind::Corrupt
            {
                return Err(error.clone());
            }
            let looked_at = |mover: Mover| mover.flow() == flow && mover.perftest().is_none();
            for outcome in measured.iter_mut().filter(|outcome| looked_at(outcome.mover)) {
                outcome.checked = Some(checked.clone());
            }
        }
        Ok(())
    }
}

/// A hand-off that the target has claimed and that was not offered yet.
pub(crate) struct HandOff<'a> {
    bench: &'a mut Bench,
    key: String,
    blocks: (u32, u32),
}

impl HandOff<'_> {
    /// Offers it; the offer ends `Released` once the target has it.
    pub(crate) fn offer(self) -> Result<kvxfer::Offer> {
        let pool = self.bench.side.pool(Flow::Out)?;
        let offer = self
            .bench
            .side
            .endpoint
            .offer(&self.key, pool, kvxfer::OfferOptions::default())?;
        let blocks: Vec<u32> = (self.blocks.0..self.blocks.0 + self.blocks.1).collect();
        let selection = crate::work::selection(pool.layout(), &blocks);
        let tokens = selection.groups.iter().map(|group| group.token_end).max().unwrap_or(0);
        offer.append(selection)?;
        offer.finish(tokens)?;
        Ok(offer)
    }
}

/// What the submitting call took.
#[derive(Debug, Clone, Copy, Default)]
struct Post {
    wall: Duration,
    cpu: Duration,
}

struct PostBegun(Instant, Duration);

impl Post {
    fn begin() -> PostBegun {
        // Asking for the thread's time is a system call: outside the window.
        let cpu = usage::thread_time();
        PostBegun(Instant::now(), cpu)
    }
}

impl PostBegun {
    fn end(self) -> Post {
        Post {
            wall: self.0.elapsed(),
            cpu: usage::thread_time() - self.1,
        }
    }
}

fn no_baseline() -> Error {
    Error::new(ErrorKind::Internal, "the baseline was not set up")
}

/// The setup of a benchmark on this machine.
pub(crate) fn local(pool_bytes: u64, (ours, theirs): (Way, Way), movers: &[Mover]) -> Setup {
    Setup {
        pool_bytes,
        window_bytes: None,
        flows: flows(movers),
        ours,
        theirs,
        listen: std::net::Ipv4Addr::LOCALHOST.into(),
        insecure: false,
        raw: movers.iter().any(|mover| mover.is_raw()),
    }
}

/// The ways that movers use, each once.
fn flows(movers: &[Mover]) -> Vec<Flow> {
    let mut flows = Vec::new();
    for flow in movers.iter().map(|mover| mover.flow()) {
        if !flows.contains(&flow) {
            flows.push(flow);
        }
    }
    flows
}

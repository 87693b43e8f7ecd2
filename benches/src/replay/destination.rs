//! The decode side of a replay.

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc;
use std::time::Duration;

use kvxfer::{Claim, ClaimOptions, EndpointAddress, Event, EventKind, Selection};
use kvxfer_core::{Error, ErrorKind, Result};
use kvxfer_testkit::pattern::{self, Content};

use super::{Item, OPEN_MAX, Report, Request, Setup, Word, Worker, until};
use crate::control::{self, Channel};
use crate::usage;
use crate::work::TOKENS_PER_BLOCK;

/// Serves the parent.
pub(crate) fn serve() -> Result<()> {
    let mut worker: Option<(Worker, Box<Setup>)> = None;
    control::serve_parent(|request, channel| match request {
        Request::Start(setup) => {
            let started = Worker::start("decode", &setup);
            channel.answer(started.map(|started| {
                let address = started.endpoint.address();
                worker = Some((started, setup));
                address
            }))
        }
        Request::Go { source, start_nanos } => match &mut worker {
            Some((worker, setup)) => {
                let replayed = replay(worker, setup, &source, start_nanos, channel);
                channel.answer(replayed.map(Word::Done))
            }
            None => channel.answer::<Word>(Err(Error::new(ErrorKind::Protocol, "Go before Start"))),
        },
    })?;
    match worker {
        Some((worker, _)) => worker.endpoint.close(Duration::from_secs(2)),
        None => Ok(()),
    }
}

/// An arrival to be looked at.
struct Arrived {
    item: Item,
    blocks: Vec<u32>,
}

/// What was found.
struct Looked {
    item: Item,
    blocks: Vec<u32>,
    bytes: Result<u64>,
}

fn replay(
    worker: &mut Worker,
    setup: &Setup,
    source: &EndpointAddress,
    start_nanos: u64,
    channel: &mut Channel,
) -> Result<Report> {
    // Bytes are checked on a thread of their own, so that arrivals are seen when they happen.
    let (arrivals, to_check) = mpsc::channel::<Arrived>();
    let (results, checked) = mpsc::channel::<Looked>();
    let (layout, regions) = (worker.layout.clone(), worker.regions.clone());
    let checker = std::thread::Builder::new()
        .name("check".into())
        .spawn(move || {
            for Arrived { item, blocks } in to_check {
                let selection = claimed(&item, blocks.clone());
                let content = Content::new(item.key().as_bytes(), 0);
                let tokens = item.held..item.tokens;
                let bytes = pattern::verify(&layout, &regions, &selection, tokens, 0..u16::MAX, content);
                if results.send(Looked { item, blocks, bytes }).is_err() {
                    break;
                }
            }
        })
        .map_err(|error| Error::new(ErrorKind::ResourceExhausted, "a thread").because(error.to_string()))?;
    let mut run = Run {
        worker,
        setup,
        source,
        open: HashMap::new(),
        hungry: VecDeque::new(),
        report: Report {
            given_nanos: vec![0; setup.items.len()],
            ended_nanos: vec![0; setup.items.len()],
            bytes: vec![0; setup.items.len()],
            ..Report::default()
        },
    };
    let outcome = run.go(start_nanos, &arrivals, &checked, channel);
    drop(arrivals);
    let report = run.report;
    let joined = checker.join();
    outcome?;
    joined.map_err(|_| Error::new(ErrorKind::Internal, "the checking thread panicked"))?;
    Ok(report)
}

struct Run<'a> {
    worker: &'a mut Worker,
    setup: &'a Setup,
    source: &'a EndpointAddress,
    open: HashMap<u64, (Claim, Vec<u32>)>,
    /// Claims that wait for blocks, in the order of the trace.
    hungry: VecDeque<u64>,
    report: Report,
}

impl Run<'_> {
    fn go(
        &mut self,
        start_nanos: u64,
        arrivals: &mpsc::Sender<Arrived>,
        checked: &mpsc::Receiver<Looked>,
        channel: &mut Channel,
    ) -> Result<()> {
        let items = &self.setup.items;
        let events = self.worker.endpoint.events();
        let mut drained: Vec<Event> = Vec::new();
        let (mut next, mut checking, mut ended) = (0, 0usize, 0u64);
        while next < items.len() || !self.open.is_empty() || checking > 0 {
            let mut pause = Duration::from_millis(if checking > 0 { 1 } else { 1000 });
            while let Some(item) = items.get(next).filter(|_| self.open.len() < OPEN_MAX) {
                let wait = until(start_nanos + item.at_nanos);
                if !wait.is_zero() {
                    pause = pause.min(wait);
                    break;
                }
                self.claim(item)?;
                next += 1;
            }
            self.feed()?;
            if events.wait(pause) {
                events.drain(&mut drained, OPEN_MAX);
            }
            let now = usage::clock_nanos();
            for event in drained.drain(..) {
                if let EventKind::Ended { .. } = event.kind
                    && let Some((claim, blocks)) = self.open.remove(&event.data)
                {
                    let item = items[event.data as usize];
                    self.hungry.retain(|&number| number != event.data);
                    match claim.arrived().poll() {
                        Some(Ok(arrival)) => {
                            self.report.ended_nanos[event.data as usize] = now;
                            self.report.bytes[event.data as usize] = arrival.bytes;
                            checking += usize::from(arrivals.send(Arrived { item, blocks }).is_ok());
                        }
                        other => {
                            let why = other
                                .and_then(Result::err)
                                .map_or("ended without a result".into(), |e| e.to_string());
                            self.report
                                .failures
                                .push(format!("decode: claim of {}: {why}", item.key()));
                            self.worker.free.extend(blocks);
                            ended += 1;
                        }
                    }
                }
            }
            while let Ok(looked) = checked.try_recv() {
                checking -= 1;
                ended += 1;
                self.note(looked);
                channel.answer(Ok(Word::Progress(ended)))?;
            }
        }
        Ok(())
    }

    fn claim(&mut self, item: &Item) -> Result<()> {
        let options = ClaimOptions {
            pull: self.setup.pull,
            events: Some(item.number),
            ..ClaimOptions::default()
        };
        let source = std::slice::from_ref(self.source);
        let claim = self
            .worker
            .endpoint
            .claim(item.key(), &self.worker.pool, source, options)?;
        self.open.insert(item.number, (claim, Vec::new()));
        self.hungry.push_back(item.number);
        self.report.open_peak = self.report.open_peak.max(self.open.len());
        Ok(())
    }

    /// Gives blocks to the claims that wait for them, first come first served.
    fn feed(&mut self) -> Result<()> {
        while let Some(&number) = self.hungry.front() {
            let item = self.setup.items[number as usize];
            let Some(blocks) = self
                .worker
                .take(item.tokens - item.held / TOKENS_PER_BLOCK * TOKENS_PER_BLOCK)
            else {
                break;
            };
            self.hungry.pop_front();
            let Some((claim, own)) = self.open.get_mut(&number) else {
                self.worker.free.extend(blocks);
                continue;
            };
            // The claim may have ended in this moment; its event says how.
            let filled = claim.fill(claimed(&item, blocks.clone()));
            *own = blocks;
            self.report.given_nanos[number as usize] = usage::clock_nanos();
            if let Err(error) = filled
                && !claim.arrived().is_done()
            {
                return Err(error);
            }
            let with_blocks = self.open.values().filter(|(_, blocks)| !blocks.is_empty()).count();
            self.report.with_blocks_peak = self.report.with_blocks_peak.max(with_blocks);
        }
        Ok(())
    }

    fn note(&mut self, looked: Looked) {
        let Looked { item, blocks, bytes } = looked;
        let index = item.number as usize;
        match bytes {
            Ok(bytes) if bytes == self.report.bytes[index] => self.report.verified_bytes += bytes,
            Ok(bytes) => self.report.failures.push(format!(
                "decode: {}: {} bytes arrived, {bytes} were selected",
                item.key(),
                self.report.bytes[index]
            )),
            Err(error) => self.report.failures.push(format!("decode: {}: {error}", item.key())),
        }
        self.worker.free.extend(blocks);
    }
}

/// What of the request the destination wants.
fn claimed(item: &Item, blocks: Vec<u32>) -> Selection {
    Selection::single(item.held, item.tokens, blocks)
}

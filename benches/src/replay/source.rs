//! The prefill side of a replay.

use std::collections::HashMap;
use std::time::Duration;

use kvxfer::{Event, EventKind, Offer, OfferOptions, Selection};
use kvxfer_core::{Error, ErrorKind, Result};
use kvxfer_testkit::pattern::{self, Content};

use super::{Item, OPEN_MAX, Report, Request, Setup, Word, Worker, until};
use crate::control::{self, Channel};
use crate::usage;
use crate::work::TOKENS_PER_BLOCK;

/// Tokens released at a time, as a prefill in chunks does.
const CHUNK_TOKENS: u32 = 512;

/// Serves the parent.
pub(crate) fn serve() -> Result<()> {
    let mut worker: Option<(Worker, Box<Setup>)> = None;
    control::serve_parent(|request, channel| match request {
        Request::Start(setup) => {
            let started = Worker::start("prefill", &setup);
            channel.answer(started.map(|started| {
                let address = started.endpoint.address();
                worker = Some((started, setup));
                address
            }))
        }
        Request::Go { start_nanos, .. } => match &mut worker {
            Some((worker, setup)) => {
                let replayed = replay(worker, &setup.items, start_nanos, channel);
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

fn replay(worker: &mut Worker, items: &[Item], start_nanos: u64, _: &mut Channel) -> Result<Report> {
    let mut report = Report {
        given_nanos: vec![0; items.len()],
        ended_nanos: vec![0; items.len()],
        ..Report::default()
    };
    let mut open: HashMap<u64, (Offer, Vec<u32>)> = HashMap::new();
    let events = worker.endpoint.events();
    let mut drained: Vec<Event> = Vec::new();
    let mut next = 0;
    while next < items.len() || !open.is_empty() {
        let mut pause = Duration::from_secs(1);
        while let Some(item) = items.get(next).filter(|_| open.len() < OPEN_MAX) {
            let wait = until(start_nanos + item.at_nanos);
            if !wait.is_zero() {
                pause = wait;
                break;
            }
            let Some(blocks) = worker.take(item.tokens) else {
                break;
            };
            let offer = offer(worker, item, &blocks)?;
            report.given_nanos[next] = usage::clock_nanos();
            open.insert(next as u64, (offer, blocks));
            report.open_peak = report.open_peak.max(open.len());
            next += 1;
            // What has ended meanwhile gives blocks back for the next one.
            if events.drain(&mut drained, OPEN_MAX) > 0 {
                break;
            }
        }
        if drained.is_empty() && events.wait(pause) {
            events.drain(&mut drained, OPEN_MAX);
        }
        for event in drained.drain(..) {
            if let EventKind::Ended { .. } = event.kind
                && let Some((offer, blocks)) = open.remove(&event.data)
            {
                report.ended_nanos[event.data as usize] = usage::clock_nanos();
                if let Some(Err(error)) = offer.released().poll() {
                    let key = items[event.data as usize].key();
                    report.failures.push(format!("prefill: offer of {key}: {error}"));
                }
                worker.free.extend(blocks);
            }
        }
    }
    Ok(report)
}

/// Puts the bytes in place that the other side will ask for, and releases them chunk by chunk.
fn offer(worker: &Worker, item: &Item, blocks: &[u32]) -> Result<Offer> {
    let key = item.key();
    let all = Selection::single(0, item.tokens, blocks.to_vec());
    let content = Content::new(key.as_bytes(), 0);
    pattern::fill(
        &worker.layout,
        &worker.regions,
        &all,
        item.held..item.tokens,
        0..u16::MAX,
        content,
    )?;
    let options = OfferOptions {
        events: Some(item.number),
        ..OfferOptions::default()
    };
    let offer = worker.endpoint.offer(&key, &worker.pool, options)?;
    let mut first_token = 0;
    for blocks in blocks.chunks((CHUNK_TOKENS / TOKENS_PER_BLOCK) as usize) {
        let token_end = (first_token + CHUNK_TOKENS).min(item.tokens);
        offer.append(Selection::single(first_token, token_end, blocks.to_vec()))?;
        offer.ready(first_token..token_end, ..)?;
        first_token = token_end;
    }
    offer.finish(item.tokens)?;
    Ok(offer)
}

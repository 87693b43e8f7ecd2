//! `kvxfer-bench gpu-check`: what only a machine with a GPU can show, in a few minutes.
//!
//! Two processes on one device hand real-shaped KV over, kernels produce and check the blocks under event gating, and
//! figures are set against the limits measured in the same run. It says what it could not check.

mod engine;
mod handovers;
mod node;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kvxfer_core::memory::{CopyState, CopyTicket, HostView, MemoryDomain, Segment};
use kvxfer_core::{Error, ErrorKind, Result};
use kvxfer_cuda::{Availability, Cuda, CudaConfig, Gather, PointerKind, probe};

use crate::cli::GpuCheckArgs;
use crate::memory::Memory as HostMemory;
use crate::rng::SplitMix64;
use crate::statistics::median;
use crate::terminal::{self, BOLD, DIM, GREEN, RED, YELLOW, bytes, duration};
use engine::{Blocks, Engine, Memory, Stream};

pub(crate) use node::serve;

/// Any single step on a busy machine.
const STEP_MAX: Duration = Duration::from_secs(60);
/// Runs everything; whether all checks passed and all figures were reached.
pub(crate) fn run(arguments: &GpuCheckArgs) -> Result<bool> {
    let begun = Instant::now();
    let mut report = Report::default();
    let config = CudaConfig {
        library: arguments.library.clone(),
        ..CudaConfig::default()
    };
    report.scene("what there is");
    let facts = match probe(&config) {
        Availability::Available(facts) => facts,
        none => {
            report.skip(&format!("everything. {none}").trim().replace('\n', " "));
            return Ok(report.end(begun));
        }
    };
    for line in facts.to_string().lines() {
        report.tell(line);
    }
    if facts.devices.len() < 2 {
        report.skip("copies between two devices, of which there is one");
    }
    report.skip("RDMA into device memory: this command uses TCP");
    driver(&mut report, arguments, &config)?;
    let device_rate = copies(&mut report, arguments, &config)?;
    handovers::staged(&mut report, arguments)?;
    handovers::mapped(&mut report, arguments, device_rate)?;
    Ok(report.end(begun))
}

/// What is told, and what went wrong so far.
#[derive(Default)]
struct Report {
    scenes: u32,
    checks: u32,
    failures: u32,
    skipped: Vec<String>,
}

impl Report {
    fn scene(&mut self, title: &str) {
        self.scenes += 1;
        terminal::line("");
        terminal::line(&terminal::paint(BOLD, &format!("{}. {title}", self.scenes)));
    }

    fn tell(&self, text: &str) {
        terminal::line(&format!("   {}", terminal::paint(DIM, text)));
    }

    fn check(&mut self, fine: bool, text: &str) {
        self.checks += 1;
        let mark = if fine {
            terminal::paint(GREEN, "ok")
        } else {
            self.failures += 1;
            terminal::paint(RED, "FAILED")
        };
        terminal::line(&format!("   {mark} {text}"));
    }

    /// A figure with what it must reach, as a ratio. With `judged` off it is only shown.
    fn figure(&mut self, name: &str, ratio: f64, least: f64, judged: bool, details: &str) {
        let text = format!("{name}: {ratio:.2} of the limit (asked {least}), {details}");
        if judged {
            self.check(ratio >= least, &text);
        } else {
            self.tell(&text);
        }
    }

    fn skip(&mut self, what: &str) {
        terminal::line(&format!("   {} {what}", terminal::paint(YELLOW, "not checked:")));
        self.skipped.push(what.to_owned());
    }

    fn end(&self, begun: Instant) -> bool {
        terminal::line("");
        let (checks, failures, skipped) = (self.checks, self.failures, self.skipped.len());
        let took = duration(begun.elapsed());
        let said = match (checks, failures) {
            (0, _) => terminal::paint(YELLOW, "skipped: nothing could be checked"),
            (_, 0) => format!(
                "{} {checks} checks passed, not checked: {skipped}, in {took}",
                terminal::paint(GREEN, "ok")
            ),
            _ => format!(
                "{} {failures} of {checks} checks, not checked: {skipped}, in {took}",
                terminal::paint(RED, "FAILED")
            ),
        };
        terminal::line(&said);
        failures == 0
    }
}

/// What kvxfer asks of a driver besides copies.
fn driver(report: &mut Report, arguments: &GpuCheckArgs, config: &CudaConfig) -> Result<()> {
    report.scene("pointers, events and streams");
    let engine = Engine::open(&arguments.library, arguments.device)?;
    let cuda = Cuda::load(config)?;
    let stream = engine.stream()?;
    let (device, pinned) = (engine.allocate(1 << 20)?, engine.pinned(4096)?);
    let ordinary = HostMemory::touched(4096)?;
    let kind = |address: u64| cuda.classify(address).map(|pointer| pointer.kind);
    report.check(
        matches!(kind(device.address + 5)?, PointerKind::Device { .. }),
        "device memory is found, with its allocation",
    );
    report.check(
        !matches!(kind(pinned.address)?, PointerKind::Device { .. })
            && !matches!(kind(ordinary.address() as u64)?, PointerKind::Device { .. }),
        "page-locked and ordinary memory are the host's",
    );
    // SAFETY: refused before any use.
    let host = unsafe { cuda.region(ordinary.address() as u64, 4096, Box::new(())) };
    report.check(host.is_err(), "host memory is refused as device memory");
    // SAFETY: the memory is freed under the region on purpose, which is only asked about itself after that.
    let region = unsafe { cuda.region(device.address, device.bytes, Box::new(())) }?;
    report.check(region.domain().verify(&region).is_ok(), "a region is what it was");
    match region.domain().dmabufs(&region) {
        Some(Ok(made)) => report.check(
            !made.is_empty(),
            &format!("device memory is exported as {} dmabuf", made.len()),
        ),
        Some(Err(error)) => report.skip(&format!("dmabufs: {error}")),
        None => report.skip("dmabufs: the device has none"),
    }
    drop(device);
    let freed = region.domain().verify(&region);
    report.check(freed.is_err(), "memory that was freed is noticed");

    let list = engine.pinned(4)?;
    let blocks = engine.allocate(4096)?;
    let fill = Blocks {
        base: blocks.address,
        block_bytes: 4096,
        list: list.address,
        count: 1,
    };
    stream.fill(fill, 1, LATE_NS)?;
    let event = stream.record()?;
    // SAFETY: a live event.
    let captured = unsafe { cuda.capture(event.raw) }?;
    drop(event);
    let early = captured.happened()?;
    stream.wait()?;
    let late = until(|| captured.happened())?;
    report.check(
        !early && late,
        "an event that was captured and destroyed happens when its kernel has ended",
    );

    // SAFETY: a live stream, which is waited for below.
    let hold = unsafe { cuda.hold_stream(stream.raw) }?;
    stream.set(pinned.address, 7, 8)?;
    std::thread::sleep(Duration::from_nanos(LATE_NS));
    let held = pinned.word(0) == 0;
    hold.release();
    stream.wait()?;
    report.check(held && pinned.word(0) != 0, "a held stream goes on when it is released");
    Ok(())
}

/// A kernel takes so long that whoever does not wait for it is early.
const LATE_NS: u64 = 20_000_000;

fn until(mut so: impl FnMut() -> Result<bool>) -> Result<bool> {
    let begun = Instant::now();
    while !so()? {
        if begun.elapsed() > STEP_MAX {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(true)
}

// ----------------------------------------------------------------------------------------------------------- copies

/// Pieces of the gather that is measured: what a request of Llama-3.1-70B at TP4 has.
const PIECES: u64 = 20_480;
const PIECE_BYTES: u64 = 8 << 10;
/// A transport's staging buffer, and how many are filled at once.
const CHUNK_BYTES: u64 = 1 << 20;
const CHUNKS_UNDER_WAY: usize = 8;

/// Gathers and scatters of kvxfer's, each way of making them, against plain copies of the device. Bytes per second from
/// device to device memory.
fn copies(report: &mut Report, arguments: &GpuCheckArgs, config: &CudaConfig) -> Result<f64> {
    report.scene("copies between device and page-locked memory");
    let engine = Engine::open(&arguments.library, arguments.device)?;
    let stream = engine.stream()?;
    let pieces = if arguments.quick { PIECES / 64 } else { PIECES };
    let total = pieces * PIECE_BYTES;
    // Every second piece of a range, so that they do not merge.
    let pool = engine.allocate(2 * total)?;
    let (device, host) = (engine.allocate(total)?, HostMemory::touched(total as usize)?);
    let address = host.address() as u64;
    let rounds = if arguments.quick { 3 } else { 9 };
    let order = SplitMix64::new(5).permutation(pieces as u32, pieces as u32);
    let segments: Vec<Segment> = order
        .into_iter()
        .map(|piece| Segment {
            region: 0,
            offset: 2 * u64::from(piece) * PIECE_BYTES,
            length: PIECE_BYTES,
        })
        .collect();
    let mut limits: [Vec<f64>; 3] = Default::default();
    let rate = |seconds: &[f64]| total as f64 / median(seconds);
    let gigabytes = |seconds: &[f64]| format!("{:.1} GB/s", rate(seconds) / 1e9);
    for way in [Gather::Auto, Gather::Kernel, Gather::Batch] {
        let cuda = Cuda::load(&CudaConfig {
            gather: way,
            ..config.clone()
        })?;
        // SAFETY: the pool outlives the region, which is dropped in this loop, and nobody holds references into it.
        let region = unsafe { cuda.region(pool.address, pool.bytes, Box::new(())) }?;
        let domain = region.domain().clone();
        let regions = [region];
        let whole = HostView {
            pointer: host.address(),
            length: total as usize,
        };
        // SAFETY: the memory outlives the pin.
        let _pin = unsafe { domain.pin_staging(whole) }?;
        let gather = |view, segments: &[Segment]| domain.start_gather(&regions, segments, view);
        let scatter = |view, segments: &[Segment]| domain.start_scatter(view, &regions, segments);
        let (mut out, mut back, mut wrong) = (Vec::new(), Vec::new(), 0);
        for round in 0..rounds {
            write_pattern(&stream, &pool, &segments, round, &host)?;
            if way == Gather::Auto {
                limits[0].push(stream.timed(|| stream.copy(address, device.address, total))?);
                limits[1].push(stream.timed(|| stream.copy(device.address, address, total))?);
                let half = total / 2;
                limits[2].push(stream.timed(|| stream.copy(device.address, device.address + half, half))? * 2.0);
            }
            out.push(timed_copies(&*domain, &segments, address, &gather)?);
            wrong += wrong_words(&host, round, pieces);
            stream.set(pool.address, 0xee, pool.bytes)?;
            stream.wait()?;
            back.push(timed_copies(&*domain, &segments, address, &scatter)?);
            // Back again by plain copies.
            for (index, segment) in segments.iter().enumerate() {
                stream.copy(
                    address + index as u64 * PIECE_BYTES,
                    pool.address + segment.offset,
                    PIECE_BYTES,
                )?;
            }
            stream.wait()?;
            wrong += wrong_words(&host, round, pieces);
        }
        if way == Gather::Auto {
            report.tell(&format!("limits: device to host {}", gigabytes(&limits[0])));
            report.tell(&format!("        host to device {}", gigabytes(&limits[1])));
            report.tell(&format!("        device to device {}", gigabytes(&limits[2])));
        }
        let name = format!("{way:?}").to_lowercase();
        report.check(
            wrong == 0,
            &format!(
                "{name}: {pieces} pieces of {} gathered and scattered {rounds} times, {wrong} wrong words",
                bytes(PIECE_BYTES)
            ),
        );
        // What kvxfer chooses by itself is judged; the others say whether it chose well.
        let judged = !arguments.quick && way == Gather::Auto;
        report.figure(
            &format!("{name}: gather"),
            rate(&out) / rate(&limits[0]),
            0.8,
            judged,
            &gigabytes(&out),
        );
        report.figure(
            &format!("{name}: scatter"),
            rate(&back) / rate(&limits[1]),
            0.8,
            judged,
            &gigabytes(&back),
        );
        for note in cuda.notes() {
            report.tell(&format!("{name}: {note}"));
        }
    }
    Ok(rate(&limits[2]))
}

/// Word `word` of piece `index` in a round.
fn pattern(round: u64, index: u64, word: u64) -> u64 {
    engine::expected(round, index as u32, word as u32)
}

/// Puts each piece's words into the pool, piece by piece through the host buffer.
fn write_pattern(stream: &Stream, pool: &Memory, segments: &[Segment], round: u64, host: &HostMemory) -> Result<()> {
    for (index, segment) in segments.iter().enumerate() {
        for word in 0..PIECE_BYTES / 8 {
            host.set_word(
                (index as u64 * PIECE_BYTES + word * 8) as usize,
                pattern(round, index as u64, word),
            );
        }
        stream.copy(
            pool.address + segment.offset,
            host.address() as u64 + index as u64 * PIECE_BYTES,
            PIECE_BYTES,
        )?;
    }
    stream.wait()
}

fn wrong_words(host: &HostMemory, round: u64, pieces: u64) -> u64 {
    let words = PIECE_BYTES / 8;
    let place = |index: u64| (index / words, index % words);
    (0..pieces * words)
        .filter(|&index| host.word(index as usize * 8) != pattern(round, place(index).0, place(index).1))
        .count() as u64
}

/// Seconds of copies by the domain as a transport makes them: chunk by chunk, several under way, polled.
fn timed_copies(
    domain: &dyn MemoryDomain,
    segments: &[Segment],
    address: u64,
    start: &dyn Fn(HostView, &[Segment]) -> Result<CopyTicket>,
) -> Result<f64> {
    let begun = Instant::now();
    let mut under_way = VecDeque::new();
    let mut chunks = segments.chunks((CHUNK_BYTES / PIECE_BYTES) as usize).enumerate();
    loop {
        while under_way.len() < CHUNKS_UNDER_WAY {
            let Some((index, chunk)) = chunks.next() else { break };
            let view = HostView {
                pointer: (address + index as u64 * CHUNK_BYTES) as *mut u8,
                length: chunk.len() * PIECE_BYTES as usize,
            };
            under_way.push_back(start(view, chunk)?);
        }
        let Some(&first) = under_way.front() else {
            return Ok(begun.elapsed().as_secs_f64());
        };
        if domain.poll_copy(first)? == CopyState::Done {
            under_way.pop_front();
        } else if begun.elapsed() > STEP_MAX {
            return Err(Error::new(ErrorKind::DeadlineExceeded, "a copy").because("the device did not finish it"));
        }
        std::hint::spin_loop();
    }
}

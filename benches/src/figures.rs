//! `kvxfer-bench figures`: every row of the benchmark's table that needs no other library, with target and verdict.

use std::sync::Arc;
use std::time::{Duration, Instant};

use comfy_table::{CellAlignment, Table, presets};
use kvxfer_core::flow::PartExtent;
use kvxfer_core::plan::{Scope, Target, source_stream};
use kvxfer_core::{Error, ErrorKind, Result};
use serde::Serialize;

use crate::cli::FiguresArgs;
use crate::measure::{self, Bench, Plan};
use crate::measured::Measured;
use crate::side::{self, Mover};
use crate::statistics::{median, quantile, rounded};
use crate::terminal::{self, GREEN, RED};
use crate::way::Way;
use crate::work::{ModelShape, Named, Shape, Work};

/// Endpoints started, and connections made, for those two rows.
const STARTS: usize = 9;
/// How long the idle endpoints are watched.
const IDLE_SECONDS: f64 = 5.0;
/// The small hand-off, and how often it is put behind the large one.
const SMALL_BYTES: u64 = 20_000_000;
const BEHIND_REPS: usize = 5;
/// Physical memory behind the large pool: its address space repeats so many bytes.
const WINDOW_BYTES: u64 = 512 << 20;

/// One row.
#[derive(Debug, Serialize)]
struct Figure {
    figure: String,
    value: f64,
    unit: &'static str,
    target: String,
    met: bool,
    detail: String,
}

/// What a value must be.
#[derive(Clone, Copy)]
enum Must {
    AtLeast(f64),
    AtMost(f64),
}

struct Figures {
    rows: Vec<Figure>,
    json: bool,
    verified: bool,
}

impl Figures {
    fn add(
        &mut self,
        figure: impl Into<String>,
        value: f64,
        unit: &'static str,
        must: Must,
        detail: String,
    ) -> Result<()> {
        let (met, target) = match must {
            Must::AtLeast(bound) => (value >= bound, format!(">= {bound}")),
            Must::AtMost(bound) => (value <= bound, format!("<= {bound}")),
        };
        let row = Figure {
            figure: figure.into(),
            value: rounded(value, 4),
            unit,
            target,
            met,
            detail,
        };
        if self.json {
            terminal::json_line(&row)?;
        }
        self.rows.push(row);
        Ok(())
    }
}

/// Measures everything. False if bytes were wrong; a missed target is a finding, not a failure.
pub(crate) fn run(arguments: &FiguresArgs) -> Result<bool> {
    let mut figures = Figures {
        rows: Vec::new(),
        json: arguments.json,
        verified: true,
    };
    // First, while this process has done nothing else: the memory of an endpoint is measured in bare processes.
    endpoint_costs(arguments, &mut figures)?;
    speeds(arguments, &mut figures)?;
    expansion(&mut figures)?;
    behind(arguments, &mut figures)?;
    if !arguments.json {
        print(&figures.rows);
        if !figures.verified {
            terminal::line(&terminal::paint(RED, "FAILED: bytes were wrong or late; see above"));
        }
    }
    Ok(figures.verified)
}

/// Both sides by this transport, with all devices.
fn by(transport: &str) -> (Way, Way) {
    (Way::by(transport), Way::by(transport))
}

fn plan(arguments: &FiguresArgs) -> Plan {
    Plan {
        reps: arguments.reps,
        warm: None,
        verify: true,
        patience: Duration::from_secs(arguments.patience),
        progress: !arguments.json,
        paced: false,
    }
}

/// Start, connect, memory, idle.
fn endpoint_costs(arguments: &FiguresArgs, figures: &mut Figures) -> Result<()> {
    let setup = measure::local(arguments.pool_bytes, by(&arguments.transport), &[Mover::Push]);
    let mut bench = Bench::with_child(&setup)?;
    let idle = bench.idle(IDLE_SECONDS)?;
    let work = Named::W5.work(arguments.pool_bytes)?;
    let measured = bench.measure(&work, &[Mover::Push], &plan(arguments))?;
    figures.verified &= measured.iter().all(Measured::verified);

    let mut starts = Vec::new();
    let mut connects = Vec::new();
    for number in 0..STARTS {
        let begun = Instant::now();
        let endpoint = setup.ours.endpoint(&format!("start-{number}"), setup.listen, false)?;
        starts.push(begun.elapsed().as_secs_f64() * 1e3);
        let begun = Instant::now();
        endpoint.connect(&bench.target.address, Duration::from_secs(5))?;
        connects.push(begun.elapsed().as_secs_f64() * 1e3);
        endpoint.close(Duration::from_secs(2))?;
    }
    let spread = |values: &[f64]| format!("median of {}, at most {:.2}", values.len(), quantile(values, 1.0));
    figures.add(
        "endpoint start",
        median(&starts),
        "ms",
        Must::AtMost(10.0),
        spread(&starts),
    )?;
    figures.add(
        "connect on loopback",
        median(&connects),
        "ms",
        Must::AtMost(3.0),
        spread(&connects),
    )?;

    let megabytes = |now: u64, before: u64| now.saturating_sub(before) as f64 / 1e6;
    let (initiator, target) = (bench.side.build, bench.target.build);
    let (idle_initiator, idle_target) = (
        megabytes(idle.0.resident, initiator.resident_before),
        megabytes(idle.1.resident, target.resident_before),
    );
    figures.add(
        "memory of an idle endpoint",
        idle_initiator.max(idle_target),
        "MB",
        Must::AtMost(8.0),
        format!("initiator {idle_initiator:.1}, target {idle_target:.1}; session open, pools touched"),
    )?;
    let peak = measured.iter().fold((0, 0), |peak, outcome| {
        (peak.0.max(outcome.resident_peak.0), peak.1.max(outcome.resident_peak.1))
    });
    let (peak_initiator, peak_target) = (
        megabytes(peak.0, initiator.resident_before),
        megabytes(peak.1, target.resident_before),
    );
    figures.add(
        "memory of an endpoint at peak",
        peak_initiator.max(peak_target),
        "MB",
        Must::AtMost(24.0),
        format!("initiator {peak_initiator:.1}, target {peak_target:.1}; during w5, with the benchmark's own lists"),
    )?;
    figures.add(
        "idle endpoint with an open session",
        100.0 * idle.0.cores.max(idle.1.cores),
        "% of a core",
        Must::AtMost(0.2),
        format!(
            "initiator {:.3}, target {:.3} over {IDLE_SECONDS} s",
            100.0 * idle.0.cores,
            100.0 * idle.1.cores
        ),
    )?;
    bench.finish()
}

/// Push, pull and the baseline, interleaved.
fn speeds(arguments: &FiguresArgs, figures: &mut Figures) -> Result<()> {
    let movers = [Mover::Push, Mover::RawPut, Mover::Pull];
    let setup = measure::local(arguments.pool_bytes, by(&arguments.transport), &movers);
    let mut bench = Bench::with_child(&setup)?;
    for (named, push_over_raw) in [
        (Named::W1, 0.85),
        (Named::W2, 0.85),
        (Named::W3, 0.75),
        (Named::W5, 0.85),
    ] {
        let work = named.work(arguments.pool_bytes)?;
        let measured = bench.measure(&work, &movers, &plan(arguments))?;
        figures.verified &= measured.iter().all(Measured::verified);
        let [push, raw, pull] = measured.as_slice() else {
            return Err(Error::new(
                ErrorKind::Internal,
                "three movers gave other than three results",
            ));
        };
        streams(figures, &work, push, raw, pull, push_over_raw)?;
    }
    let work = Named::W4.work(arguments.pool_bytes)?;
    let measured = bench.measure(&work, &[Mover::Push, Mover::RawPut], &plan(arguments))?;
    let [push, raw] = measured.as_slice() else {
        return Err(Error::new(
            ErrorKind::Internal,
            "two movers gave other than two results",
        ));
    };
    let (speed, [low, high]) = push.speed_over(raw);
    figures.add(
        "w4 round trip over raw",
        1.0 / speed,
        "x",
        Must::AtMost(2.5),
        format!(
            "{:.1} µs against {:.1} µs (p99 {:.1} and {:.1}); quartiles {:.2}..{:.2}",
            1e6 * push.seconds(),
            1e6 * raw.seconds(),
            1e6 * push.slow_seconds(),
            1e6 * raw.slow_seconds(),
            1.0 / high,
            1.0 / low
        ),
    )?;
    bench.finish()
}

fn streams(
    figures: &mut Figures,
    work: &Work,
    push: &Measured,
    raw: &Measured,
    pull: &Measured,
    push_over_raw: f64,
) -> Result<()> {
    let gbps = |measured: &Measured| work.bytes() as f64 / measured.seconds() / 1e9;
    let name = &work.name;
    let (speed, [low, high]) = push.speed_over(raw);
    let clean = push.reps.iter().filter(|rep| !rep.disturbed).count();
    figures.add(
        format!("push {name} over raw"),
        speed,
        "x",
        Must::AtLeast(push_over_raw),
        format!(
            "{:.2} against {:.2} GB/s; quartiles {low:.2}..{high:.2}; {clean} of {} repetitions undisturbed",
            gbps(push),
            gbps(raw),
            push.reps.len()
        ),
    )?;
    let (speed, [low, high]) = pull.speed_over(push);
    figures.add(
        format!("pull {name} over push"),
        speed,
        "x",
        Must::AtLeast(0.9),
        format!(
            "{:.2} against {:.2} GB/s; quartiles {low:.2}..{high:.2}",
            gbps(pull),
            gbps(push)
        ),
    )?;
    let cpu = |measured: &Measured| measured.cpu_per_gb(work.bytes());
    let ((own_i, own_t), (raw_i, raw_t)) = (cpu(push), cpu(raw));
    figures.add(
        format!("processor time of push {name} over raw"),
        (own_i + own_t) / (raw_i + raw_t),
        "x",
        Must::AtMost(1.25),
        format!("{own_i:.3} + {own_t:.3} against {raw_i:.3} + {raw_t:.3} s/GB (initiator + target)"),
    )?;
    if work.name == Named::W5.name() {
        let posts: Vec<f64> = push.reps.iter().map(|rep| 1e6 * rep.post_seconds).collect();
        let cpu: Vec<f64> = push.reps.iter().map(|rep| 1e6 * rep.post_cpu_seconds).collect();
        figures.add(
            "submit of w5 on the caller's thread",
            push.post_us(),
            "µs",
            Must::AtMost(20.0),
            format!(
                "quartiles {:.1}..{:.1}; processor time of that thread {:.1}",
                quantile(&posts, 0.25),
                quantile(&posts, 0.75),
                median(&cpu)
            ),
        )?;
    }
    Ok(())
}

/// Expanding w5's segments from its block lists.
fn expansion(figures: &mut Figures) -> Result<()> {
    let work = Named::W5.work(1 << 30)?;
    let micros = expansion_us(&work, 200)?;
    figures.add(
        "expanding w5's 20,480 segments",
        median(&micros),
        "µs",
        Must::AtMost(100.0),
        format!(
            "quartiles {:.1}..{:.1}",
            quantile(&micros, 0.25),
            quantile(&micros, 0.75)
        ),
    )
}

/// Microseconds to plan a push of the workload and to list all of its segments, `times` times.
fn expansion_us(work: &Work, times: usize) -> Result<Vec<f64>> {
    let layout = Arc::new(work.shape.layout()?);
    let whole = |selection| {
        Arc::new(Target::Selection {
            selection,
            scope: Scope {
                layers: (0..layout.layers().len() as u16).collect(),
                heads: None,
            },
        })
    };
    let (source, destination) = (
        whole(work.source_selection(&layout)),
        whole(work.destination_selection(&layout)),
    );
    let mut segments = Vec::with_capacity(work.pieces() as usize);
    let mut micros = Vec::with_capacity(times);
    for _ in 0..times {
        segments.clear();
        let begun = Instant::now();
        let stream = source_stream(&layout, &source, &layout, &destination, PartExtent::WHOLE)?;
        let covered = stream.segments(0, stream.length(), usize::MAX, &mut segments);
        micros.push(1e6 * begun.elapsed().as_secs_f64());
        if covered != work.bytes() || segments.is_empty() || segments.len() as u64 > work.pieces() {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("a plan of {} bytes in {} segments", covered, segments.len()),
            ));
        }
    }
    Ok(micros)
}

/// A small hand-off behind a large one.
fn behind(arguments: &FiguresArgs, figures: &mut Figures) -> Result<()> {
    let model = ModelShape {
        name: "llama-3.1-70b".into(),
        tensor_size: 4,
    };
    let planes = model.layout(1)?.planes().len() as u64;
    let per_block = planes * (8 << 10);
    let small = SMALL_BYTES.div_ceil(per_block) as u32;
    let large = arguments.large_bytes.div_ceil(per_block) as u32;
    let work = Work {
        name: "behind".into(),
        shape: Shape {
            planes: planes as u32,
            blocks: large + small,
            block_bytes: 8 << 10,
            model: Some(model),
        },
        source: vec![0],
        destination: vec![0],
        reps: 1,
        warm: 0,
        ping_pong: false,
    };
    let mut setup = measure::local(work.shape.bytes(), by(&arguments.transport), &[Mover::Push]);
    setup.window_bytes = Some(WINDOW_BYTES.min(work.shape.bytes()));
    let mut bench = Bench::with_child(&setup)?;
    bench.take(&work)?;
    let wait = side::TRANSFER_MAX;
    let bar = (!arguments.json).then(|| terminal::progress(2 * BEHIND_REPS as u64, "a small one behind a large one"));
    let (mut alone, mut behind) = (Vec::new(), Vec::new());
    for rep in 0..BEHIND_REPS {
        let key = format!("alone-{rep}");
        let hand_off = bench.hand_off(&key, (large, small))?;
        let begun = Instant::now();
        hand_off.offer()?.released().wait(wait)?;
        alone.push(begun.elapsed().as_secs_f64());
        bench.claim_end(&key)?;

        let (large_key, key) = (format!("large-{rep}"), format!("small-{rep}"));
        let large_offer = bench.hand_off(&large_key, (0, large))?.offer()?;
        let hand_off = bench.hand_off(&key, (large, small))?;
        let begun = Instant::now();
        hand_off.offer()?.released().wait(wait)?;
        let took = begun.elapsed().as_secs_f64();
        // The large one must still be going on, or this says nothing.
        if large_offer.released().is_done() {
            return Err(
                Error::new(ErrorKind::Internal, "the large hand-off ended before the small one")
                    .remedy("give more --large-bytes"),
            );
        }
        behind.push(took);
        large_offer.released().wait(wait)?;
        bench.claim_end(&large_key)?;
        bench.claim_end(&key)?;
        if let Some(bar) = &bar {
            bar.inc(2);
        }
    }
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    figures.add(
        format!(
            "{} MB behind {:.1} GB, over its time alone",
            SMALL_BYTES / 1_000_000,
            arguments.large_bytes as f64 / 1e9
        ),
        median(&behind) / median(&alone),
        "x",
        Must::AtMost(3.0),
        format!(
            "{:.1} ms against {:.1} ms; behind {:.1}..{:.1}",
            1e3 * median(&behind),
            1e3 * median(&alone),
            1e3 * quantile(&behind, 0.0),
            1e3 * quantile(&behind, 1.0)
        ),
    )?;
    bench.finish()
}

fn print(rows: &[Figure]) {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    table.set_header(["figure", "measured", "target", "", "detail"]);
    for row in rows {
        table.add_row([
            row.figure.clone(),
            format!("{:.3} {}", row.value, row.unit),
            format!("{} {}", row.target, row.unit),
            if row.met {
                terminal::paint(GREEN, "ok")
            } else {
                terminal::paint(RED, "missed")
            },
            row.detail.clone(),
        ]);
    }
    for column in table.column_iter_mut().skip(1).take(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    terminal::line(&table.to_string());
    let met = rows.iter().filter(|row| row.met).count();
    terminal::line(&format!("{met} of {} targets reached", rows.len()));
}

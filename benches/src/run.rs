//! `run`, `serve` and `connect`: measure between two processes, on one machine or two.

use std::net::TcpListener;
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use kvxfer_core::{Error, ErrorKind, Result};
use serde::Serialize;

use crate::cli::{self, Baseline, ConnectArgs, Direction, MeasureArgs, ServeArgs};
use crate::control::{self, Channel};
use crate::measure::{self, Bench, Other, Plan};
use crate::measured::{Measured, Rep};
use crate::side::{Mover, Request, Setup, Target};
use crate::statistics::rounded;
use crate::work::Work;
use crate::{perftest, terminal};

/// Pairs of a run against perftest.
const IB_PAIRS: u32 = 9;
/// How long `serve` keeps an idle run.
const SERVE_IDLE_MAX: Duration = Duration::from_secs(600);

/// One result, as one line of JSON. The first fields are those of the comparison scripts.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    peer: &'static str,
    version: &'static str,
    transport: String,
    workload: String,
    direction: &'static str,
    gbps: Option<f64>,
    descs_per_s: Option<u64>,
    p50_us: f64,
    p99_us: f64,
    cpu_s_per_gb_initiator: Option<f64>,
    cpu_s_per_gb_target: Option<f64>,
    verified: Option<bool>,
    late_reps: usize,
    gbps_best: Option<f64>,
    gbps_worst: Option<f64>,
    post_us: Option<f64>,
    reps: usize,
    reps_clean: usize,
    bytes: u64,
    pieces: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio_to_raw: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio_to_ib: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio_quartiles: Option<[f64; 2]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Measures between this process and a child.
pub(crate) fn local(arguments: &MeasureArgs) -> Result<bool> {
    let works = arguments.works()?;
    let movers = movers(arguments, &works)?;
    let setup = Setup {
        window_bytes: arguments.window_bytes,
        ..measure::local(arguments.pool_bytes, arguments.ways()?, &movers)
    };
    let bench = Bench::with_child(&setup)?;
    all(bench, &works, &movers, arguments)
}

/// Measures between this process and a `serve` elsewhere.
pub(crate) fn connect(arguments: &ConnectArgs) -> Result<bool> {
    cli::check_network(arguments.address, arguments.insecure_network)?;
    let works = arguments.measure.works()?;
    let movers = movers(&arguments.measure, &works)?;
    let channel = Channel::connect(arguments.address)?;
    let setup = Setup {
        listen: arguments.address.ip(),
        insecure: arguments.insecure_network,
        window_bytes: arguments.measure.window_bytes,
        ..measure::local(arguments.measure.pool_bytes, arguments.measure.ways()?, &movers)
    };
    let bench = Bench::start(Other::Remote(channel), &setup)?;
    all(bench, &works, &movers, &arguments.measure)
}

/// Is the target of one `connect`.
pub(crate) fn serve(arguments: &ServeArgs) -> Result<()> {
    cli::check_network(arguments.address, arguments.insecure_network)?;
    let listener = TcpListener::bind(arguments.address).map_err(|error| {
        Error::new(ErrorKind::Transport, format!("listening on {}", arguments.address))
            .because(error.to_string())
            .remedy("choose a free port of an address of this machine")
    })?;
    let address = listener.local_addr().map_or(arguments.address, |address| address);
    terminal::line(&format!(
        "waiting on {address}; on the other machine: kvxfer-bench connect {address}"
    ));
    let mut channel = Channel::accept(&listener)?;
    let mut target = Target::default();
    while let Some(mut request) = channel.receive::<Request>(SERVE_IDLE_MAX)? {
        if let Request::Start(setup) = &mut request {
            // This side's own word counts, whatever the other asks for.
            setup.insecure = arguments.insecure_network;
            setup.listen = address.ip();
        }
        target.handle(request, &mut channel)?;
    }
    target.finish()?;
    terminal::line("done");
    Ok(())
}

/// The child's side of [`local`].
pub(crate) fn target() -> Result<()> {
    let mut target = Target::default();
    control::serve_parent(|request, channel| target.handle(request, channel))?;
    target.finish()
}

fn movers(arguments: &MeasureArgs, works: &[Work]) -> Result<Vec<Mover>> {
    if arguments.direction == Direction::Pull && works.iter().any(|work| work.ping_pong) {
        return Err(
            Error::new(ErrorKind::InvalidArgument, "workload w4 with --direction pull")
                .because("a ping-pong of messages is pushed in both directions")
                .remedy("leave --direction out for w4"),
        );
    }
    let (own, raw, ib) = match arguments.direction {
        Direction::Push => (Mover::Push, Mover::RawPut, Mover::IbWrite),
        Direction::Pull => (Mover::Pull, Mover::RawGet, Mover::IbRead),
    };
    if arguments.against != Some(Baseline::Ib) {
        let baseline = arguments.against.map(|_| raw);
        return Ok([Some(own), baseline].into_iter().flatten().collect());
    }
    let cannot = |what: &str, why: &str, remedy: &str| {
        Err(Error::new(ErrorKind::InvalidArgument, format!("--against ib {what}"))
            .because(why)
            .remedy(remedy))
    };
    if arguments.device.len() != 1 {
        return cannot(
            "without one --device",
            "perftest uses one device on each side, and so must what is compared with it",
            "name it: --device mlx5_0, or --device rxe0=rxe1 for ours and theirs",
        );
    }
    if works.iter().any(|work| work.ping_pong) {
        return cannot(
            "for workload w4",
            "perftest's bandwidth says nothing about round trips",
            "leave w4 out",
        );
    }
    ib.perftest().map_or(Ok(()), perftest::Program::check)?;
    Ok(vec![own, ib])
}

fn all(mut bench: Bench, works: &[Work], movers: &[Mover], arguments: &MeasureArgs) -> Result<bool> {
    let against_ib = arguments.against == Some(Baseline::Ib);
    let transport = bench.transport().unwrap_or_else(|| arguments.transport.clone());
    let plan = Plan {
        reps: arguments.reps.or(against_ib.then_some(IB_PAIRS)),
        warm: arguments.warm.or(against_ib.then_some(1)),
        verify: arguments.verify,
        patience: arguments.patience(),
        progress: !arguments.json && !arguments.paced,
        paced: arguments.paced,
    };
    let mut rows = Vec::new();
    for work in works {
        let measured = bench.measure(work, movers, &plan)?;
        for outcome in &measured {
            let baseline = measured
                .iter()
                .find(|other| outcome.mover.is_kvxfer() && !other.mover.is_kvxfer());
            let row = row(work, outcome, baseline, &transport, arguments.verify);
            if arguments.json {
                terminal::json_line(&row)?;
            }
            rows.push(row);
        }
    }
    if !arguments.json {
        terminal::line(&format!("connected in {}", terminal::duration(bench.connect)));
        terminal::line(&bench.path());
        terminal::line("");
        print(&rows);
    }
    bench.finish()?;
    Ok(rows.iter().all(|row| row.verified != Some(false)))
}

/// A mover's result in the form of the scripts.
pub(crate) fn row(work: &Work, outcome: &Measured, baseline: Option<&Measured>, transport: &str, verify: bool) -> Row {
    let streaming = !work.ping_pong;
    let seconds = outcome.seconds();
    let counted = outcome.counted();
    let gbps = |seconds: f64| rounded(work.bytes() as f64 / seconds / 1e9, 3);
    let (cpu_initiator, cpu_target) = outcome.cpu_per_gb(work.bytes());
    let ratio = baseline.map(|baseline| outcome.speed_over(baseline));
    let ratio_to = |is_meant: fn(Mover) -> bool| {
        let meant = baseline.is_some_and(|baseline| is_meant(baseline.mover));
        ratio.filter(|_| meant).map(|(ratio, _)| rounded(ratio, 3))
    };
    // Its processes come and go with all their memory: what they cost says nothing.
    let perftest = outcome.mover.perftest();
    Row {
        peer: match outcome.mover {
            Mover::Push | Mover::Pull => "kvxfer",
            Mover::RawPut | Mover::RawGet => "raw",
            Mover::IbWrite | Mover::IbRead => "perftest",
        },
        version: env!("CARGO_PKG_VERSION"),
        transport: match perftest {
            Some(program) => program.name().to_owned(),
            None if outcome.mover.is_raw() => format!("tcp{}", crate::raw::STREAMS),
            None => transport.to_owned(),
        },
        workload: work.name.clone(),
        direction: match outcome.mover {
            Mover::Push | Mover::RawPut | Mover::IbWrite => "write",
            Mover::Pull | Mover::RawGet | Mover::IbRead => "read",
        },
        gbps: streaming.then(|| gbps(seconds)),
        descs_per_s: streaming.then(|| (work.pieces() as f64 / seconds).round() as u64),
        p50_us: rounded(seconds * 1e6, 2),
        p99_us: rounded(outcome.slow_seconds() * 1e6, 2),
        cpu_s_per_gb_initiator: (streaming && perftest.is_none()).then(|| rounded(cpu_initiator, 4)),
        cpu_s_per_gb_target: (streaming && perftest.is_none()).then(|| rounded(cpu_target, 4)),
        // Every ping checks its message and its block; streams are verified if every byte was looked at.
        verified: (perftest.is_none() && (verify || work.ping_pong)).then(|| outcome.verified()),
        late_reps: outcome.reps.iter().filter(|rep| rep.late).count(),
        gbps_best: best_and_worst(&counted).map(|(best, _)| gbps(best)),
        gbps_worst: best_and_worst(&counted).map(|(_, worst)| gbps(worst)),
        post_us: (streaming && outcome.mover.is_kvxfer()).then(|| rounded(outcome.post_us(), 2)),
        reps: if streaming {
            outcome.reps.len()
        } else {
            outcome.rounds.iter().map(Vec::len).sum()
        },
        reps_clean: outcome.reps.iter().filter(|rep| !rep.disturbed).count(),
        bytes: work.bytes(),
        pieces: work.pieces(),
        ratio_to_raw: ratio_to(Mover::is_raw),
        ratio_to_ib: ratio_to(|mover| mover.perftest().is_some()),
        ratio_quartiles: ratio.map(|(_, [low, high])| [rounded(low, 3), rounded(high, 3)]),
        error: match &outcome.checked {
            Some(Err(error)) => Some(error.to_string()),
            _ => None,
        },
    }
}

fn best_and_worst(reps: &[Rep]) -> Option<(f64, f64)> {
    let seconds = || reps.iter().map(|rep| rep.seconds);
    let best = seconds().min_by(f64::total_cmp)?;
    Some((best, seconds().max_by(f64::total_cmp)?))
}

fn print(rows: &[Row]) {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "workload",
        "way",
        "by",
        "GB/s",
        "worst..best",
        "pieces/s",
        "p50",
        "p99",
        "CPU s/GB",
        "verified",
        "of baseline",
    ]);
    let optional = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
    let micros = |value: f64| terminal::duration(Duration::from_secs_f64(value / 1e6));
    for row in rows {
        table.add_row([
            row.workload.clone(),
            row.direction.to_owned(),
            format!("{} {}", row.peer, row.transport),
            optional(row.gbps),
            match (row.gbps_worst, row.gbps_best) {
                (Some(worst), Some(best)) => format!("{worst:.2}..{best:.2}"),
                _ => "-".to_owned(),
            },
            row.descs_per_s.map_or("-".to_owned(), |count| count.to_string()),
            micros(row.p50_us),
            micros(row.p99_us),
            match (row.cpu_s_per_gb_initiator, row.cpu_s_per_gb_target) {
                (Some(initiator), Some(target)) => format!("{initiator:.3} + {target:.3}"),
                _ => "-".to_owned(),
            },
            match row.verified {
                Some(true) => "yes".to_owned(),
                Some(false) => "NO".to_owned(),
                None => "not asked".to_owned(),
            },
            match (row.ratio_to_raw.or(row.ratio_to_ib), row.ratio_quartiles) {
                (Some(ratio), Some([low, high])) => format!("{ratio:.2} ({low:.2}..{high:.2})"),
                _ => String::new(),
            },
        ]);
    }
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    terminal::line(&table.to_string());
    for row in rows {
        if let Some(error) = &row.error {
            terminal::line(&format!("{} {}: {error}", row.workload, row.peer));
        }
        if row.late_reps > 0 {
            terminal::line(&format!(
                "{} {}: in {} of {} repetitions the bytes were not there when completion was reported",
                row.workload, row.peer, row.late_reps, row.reps
            ));
        }
    }
}

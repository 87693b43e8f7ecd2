//! Hand-overs between two processes on one device: their bytes, under kernels and events, and their figures.

use kvxfer::EndpointAddress;
use kvxfer_core::Result;

use super::node::{self, Kind, Request, Setup};
use super::{Report, STEP_MAX};
use crate::cli::GpuCheckArgs;
use crate::control::Child;
use crate::statistics::median;
use crate::terminal;
use crate::work::{Named, Work};

/// Functions of the driver that wait for the device: kvxfer calls none of them.
const SYNCHRONISING: [&str; 6] = [
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cuMemcpy",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
];

struct Pair {
    source: Child,
    destination: Child,
    source_address: EndpointAddress,
    works: Vec<Work>,
}

/// Between two processes that stage.
pub(super) fn staged(report: &mut Report, arguments: &GpuCheckArgs) -> Result<()> {
    let mut pair = Pair::start(arguments, false)?;
    report.scene("kernels that produce and check the blocks, ordered by events");
    gated(report, arguments, &mut pair)?;
    report.scene("hand-overs over TCP between two processes, device and host memory in turn");
    let staged = workloads(report, arguments, &mut pair, &[Kind::Host, Kind::Device])?;
    for (shape, seconds) in &staged {
        let rate = |seconds: &[f64]| shape.bytes() as f64 / median(seconds) / 1e9;
        let (host, device) = (rate(&seconds[0]), rate(&seconds[1]));
        let judged = !arguments.quick && shape.name == "w5";
        let details = format!("{device:.2} GB/s from device to device memory, {host:.2} between host memory");
        report.figure(&format!("{} staged", shape.name), device / host, 0.85, judged, &details);
    }
    calls(report, &mut pair)
}

/// Between two processes that map each other's memory. `device_rate` is what plain copies inside the device reach, in bytes
/// per second.
pub(super) fn mapped(report: &mut Report, arguments: &GpuCheckArgs, device_rate: f64) -> Result<()> {
    report.scene("the same between two processes, the destination copying out of the source's memory by itself");
    let mut pair = Pair::start(arguments, true)?;
    // The first bytes are staged, while the memory is being mapped.
    for request in FIRST_OTHER_REQUEST..FIRST_OTHER_REQUEST + MAPPED_WITHIN {
        one_request(&mut pair, request, 100, true)?;
        if pair.imported()? > 0.0 {
            break;
        }
    }
    if pair.imported()? == 0.0 {
        report.skip("copies between two processes' memory: the destination could not map the source's (below)");
        return calls(report, &mut pair);
    }
    gated(report, arguments, &mut pair)?;
    for (shape, seconds) in &workloads(report, arguments, &mut pair, &[Kind::Device])? {
        let rate = shape.bytes() as f64 / median(&seconds[0]);
        report.tell(&format!(
            "{} mapped: {:.1} GB/s, {:.2} of a plain copy inside the device",
            shape.name,
            rate / 1e9,
            rate / device_rate
        ));
    }
    calls(report, &mut pair)
}

/// Requests are numbered once.
const FIRST_OTHER_REQUEST: u32 = 10_000;
/// Hand-overs within which memory is mapped, or it is not mapped at all.
const MAPPED_WITHIN: u32 = 50;

impl Pair {
    fn start(arguments: &GpuCheckArgs, share: bool) -> Result<Pair> {
        let pool_bytes = if arguments.quick { 16 << 20 } else { 1 << 30 };
        let works: Vec<Work> = [Named::W2, Named::W3, Named::W5]
            .into_iter()
            .map(|named| named.work(pool_bytes))
            .collect::<Result<_>>()?;
        let start = |name: &str| -> Result<(Child, EndpointAddress)> {
            let mut child = Child::start(name, &["peer", "gpu-node"])?;
            let setup = Setup {
                name: name.to_owned(),
                library: arguments.library.clone(),
                device: arguments.device,
                share,
                works: works.clone(),
            };
            let address = child.ask(&Request::Start(setup), STEP_MAX)?;
            Ok((child, address))
        };
        let (mut source, source_address) = start("prefill")?;
        let (destination, address) = start("decode")?;
        let () = source.ask(&Request::Connect(address), STEP_MAX)?;
        Ok(Pair {
            source,
            destination,
            source_address,
            works,
        })
    }

    /// Bytes that the destination has copied out of the source's memory.
    fn imported(&mut self) -> Result<f64> {
        let counters: Vec<(String, f64)> = self.destination.ask(&Request::Counters, STEP_MAX)?;
        let imported = counters
            .iter()
            .filter(|(line, _)| line.starts_with("kvxfer_cuda_import_bytes_total"));
        Ok(imported.map(|(_, bytes)| bytes).sum())
    }
}

/// Kernels produce blocks part by part, late; others check them, launched after the arrival or waiting for it on their
/// stream. Blocks are reused at once.
fn gated(report: &mut Report, arguments: &GpuCheckArgs, pair: &mut Pair) -> Result<()> {
    let rounds = if arguments.quick { 8 } else { 200 };
    let (mut wrong, mut torn) = (0, 0);
    for request in 0..rounds {
        let found = one_request(pair, request, 400, true)?;
        wrong += found;
        torn += u32::from(found > 0);
    }
    report.check(
        wrong == 0,
        &format!(
            "{rounds} requests in {} parts, each gated on an event: {torn} torn, {wrong} wrong words",
            node::PARTS
        ),
    );
    // The same without the events: unless the check sees that, it can see nothing.
    let mut seen = 0;
    for request in rounds..rounds + 8 {
        seen += u32::from(one_request(pair, request, 50_000, false)? > 0);
        if seen > 0 {
            break;
        }
    }
    report.check(seen > 0, "and without the events the check finds early data");
    Ok(())
}

fn one_request(pair: &mut Pair, request: u32, wait_us: u64, gated: bool) -> Result<u64> {
    let claim = Request::Claim {
        request,
        source: pair.source_address.clone(),
        // Every second check waits on its stream.
        hold: request % 2 == 1,
    };
    let offer = Request::Offer {
        request,
        wait_us,
        gated,
    };
    // Either may come first.
    if request.is_multiple_of(3) {
        let () = pair.source.ask(&offer, STEP_MAX)?;
        let () = pair.destination.ask(&claim, STEP_MAX)?;
    } else {
        let () = pair.destination.ask(&claim, STEP_MAX)?;
        let () = pair.source.ask(&offer, STEP_MAX)?;
    }
    let wrong = pair.destination.ask(&Request::Verify { request }, STEP_MAX)?;
    let () = pair.source.ask(&Request::Released { request }, STEP_MAX)?;
    Ok(wrong)
}

/// The benchmark's workloads between pools of these kinds, in turn: for each the seconds of each kind.
fn workloads(
    report: &mut Report,
    arguments: &GpuCheckArgs,
    pair: &mut Pair,
    kinds: &[Kind],
) -> Result<Vec<(Work, Vec<Vec<f64>>)>> {
    let rounds: u64 = if arguments.quick { 2 } else { 7 };
    let mut all = Vec::new();
    for (work, shape) in pair.works.clone().into_iter().enumerate() {
        let mut seconds = vec![Vec::new(); kinds.len()];
        let mut wrong = 0;
        for round in 0..=rounds {
            for (&kind, seconds) in kinds.iter().zip(&mut seconds) {
                let seed = round * 100 + work as u64 * 10 + kind as u64 + 1;
                let grant = pair.destination.ask(&Request::Grant { work, kind }, STEP_MAX)?;
                let push = Request::Push {
                    work,
                    kind,
                    seed,
                    grant,
                };
                let took: f64 = pair.source.ask(&push, STEP_MAX)?;
                let found: u64 = pair.destination.ask(&Request::Check { work, kind, seed }, STEP_MAX)?;
                wrong += found;
                // The first allocates, pins and maps.
                if round > 0 {
                    seconds.push(took);
                }
            }
        }
        report.check(
            wrong == 0,
            &format!(
                "{}: {} pieces, {} times each, {wrong} wrong words",
                shape.name,
                shape.pieces(),
                rounds + 1
            ),
        );
        all.push((shape, seconds));
    }
    Ok(all)
}

/// What kvxfer called.
fn calls(report: &mut Report, pair: &mut Pair) -> Result<()> {
    for (name, child) in [("prefill", &mut pair.source), ("decode", &mut pair.destination)] {
        let counters: Vec<(String, f64)> = child.ask(&Request::Counters, STEP_MAX)?;
        let calls: Vec<(&str, u64)> = counters
            .iter()
            .filter_map(|(line, value)| {
                let function = line.strip_prefix("kvxfer_cuda_driver_calls_total{call=\"")?;
                Some((function.trim_end_matches("\"}"), *value as u64))
            })
            .collect();
        let waiting = calls.iter().filter(|(function, _)| SYNCHRONISING.contains(function));
        let waiting: u64 = waiting.map(|(_, count)| count).sum();
        report.check(
            waiting == 0 && !calls.is_empty(),
            &format!(
                "{name}: {waiting} calls that wait for the device, of {} functions",
                calls.len()
            ),
        );
        let said: Vec<String> = calls
            .iter()
            .map(|(function, count)| format!("{function} {count}"))
            .collect();
        report.tell(&format!("{name}: {}", said.join(", ")));
        for (line, value) in counters
            .iter()
            .filter(|(line, value)| *value > 0.0 && !line.contains("calls_total{call="))
        {
            report.tell(&format!("{name}: {line} {value}"));
        }
    }
    let explained: String = pair
        .destination
        .ask(&Request::Explain(pair.source_address.clone()), STEP_MAX)?;
    for line in terminal::path_of(&explained) {
        report.tell(line);
    }
    Ok(())
}

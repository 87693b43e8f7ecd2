//! `kvxfer-bench doctor`: what this machine can do, and why not more. Each check is one line, with a remedy.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;

use kvxfer::Config;
use kvxfer_core::Result;
use kvxfer_rdma::probe::{self, Availability, Level, ProbeOptions};
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::terminal;

/// Socket buffers that the tcp transport asks for.
const SOCKET_BUFFER_BYTES_WANTED: u64 = 4 << 20;
/// Open files that an endpoint with a hundred peers needs, with room for the engine.
const OPEN_FILES_WANTED: u64 = 4096;

/// How a check went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    /// As it should be.
    Ok,
    /// Works, but something would be better.
    Warn,
    /// kvxfer cannot work like this.
    Fail,
    /// A fact, neither good nor bad.
    Info,
}

#[derive(Debug, Serialize)]
struct Check {
    check: &'static str,
    status: Status,
    found: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    remedy: String,
}

/// Runs all checks and prints them; says whether none failed.
pub(crate) fn run(json: bool) -> Result<bool> {
    let mut checks = vec![
        kernel(),
        cores(),
        clock(),
        loopback(
            "tcp over ipv4",
            SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            Status::Fail,
        ),
        loopback(
            "tcp over ipv6",
            SocketAddr::from((Ipv6Addr::LOCALHOST, 0)),
            Status::Warn,
        ),
        listening(),
        socket_buffers(),
        locked_memory(),
        open_files(),
        huge_pages(),
        transparent_huge_pages(),
    ];
    checks.extend(rdma());
    checks.extend(gpu());
    checks.push(process_namespace());
    for check in &checks {
        if json {
            terminal::json_line(check)?;
        } else {
            let (mark, colour) = match check.status {
                Status::Ok => ("ok  ", terminal::GREEN),
                Status::Warn => ("warn", terminal::YELLOW),
                Status::Fail => ("FAIL", terminal::RED),
                Status::Info => ("info", terminal::DIM),
            };
            terminal::line(&format!(
                "{} {:<22} {}",
                terminal::paint(colour, mark),
                check.check,
                check.found
            ));
            if !check.remedy.is_empty() {
                terminal::line(&terminal::paint(
                    terminal::DIM,
                    &format!("{:27} -> {}", "", check.remedy),
                ));
            }
        }
    }
    Ok(checks.iter().all(|check| check.status != Status::Fail))
}

fn report(check: &'static str, status: Status, found: impl Into<String>, remedy: impl Into<String>) -> Check {
    Check {
        check,
        status,
        found: found.into(),
        remedy: if matches!(status, Status::Ok) {
            String::new()
        } else {
            remedy.into()
        },
    }
}

fn kernel() -> Check {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let status = if version >= (4, 18) { Status::Ok } else { Status::Warn };
    report(
        "kernel",
        status,
        format!("Linux {release}"),
        "kvxfer is tested on Linux 4.18 and later: use a newer kernel",
    )
}

fn cores() -> Check {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let data_threads = (cores / 2).clamp(1, 8);
    let spins = cores > data_threads + 2;
    let found = format!(
        "{cores}, so {data_threads} data thread{} by default, {}",
        if data_threads == 1 { "" } else { "s" },
        if spins {
            "which spin before they sleep"
        } else {
            "which do not spin"
        }
    );
    if spins {
        report("cores", Status::Ok, found, "")
    } else {
        report(
            "cores",
            Status::Warn,
            found,
            "with at least 4 cores data threads may spin, which shortens round trips",
        )
    }
}

fn clock() -> Check {
    let boot = clock_gettime(ClockId::Boottime);
    let monotonic = clock_gettime(ClockId::Monotonic);
    let suspended = boot.tv_sec - monotonic.tv_sec;
    report(
        "deadline clock",
        Status::Ok,
        format!("CLOCK_BOOTTIME, {suspended} s of it suspended"),
        "",
    )
}

fn loopback(check: &'static str, address: SocketAddr, bad: Status) -> Check {
    let tried = (|| -> std::io::Result<()> {
        let listener = TcpListener::bind(address)?;
        let there = listener.local_addr()?;
        let stream = TcpStream::connect_timeout(&there, Duration::from_secs(1))?;
        listener.accept()?;
        stream.set_nodelay(true)
    })();
    match tried {
        Ok(()) => report(check, Status::Ok, format!("loopback works ({})", address.ip()), ""),
        Err(error) => report(
            check,
            bad,
            format!("{}: {error}", address.ip()),
            "bring the loopback interface up (ip link set lo up), or enable this family (sysctl net.ipv6.conf.all.disable_ipv6=0)",
        ),
    }
}

fn listening() -> Check {
    match TcpListener::bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))) {
        Ok(_) => report(
            "listening",
            Status::Ok,
            "allowed on all interfaces (kvxfer keeps to loopback unless told otherwise in words)",
            "",
        ),
        Err(error) => report(
            "listening",
            Status::Warn,
            format!("refused beyond loopback: {error}"),
            "allow bind() in the sandbox or seccomp profile to serve other machines",
        ),
    }
}

fn socket_buffers() -> Check {
    let limit = |name: &str| number(&format!("/proc/sys/net/core/{name}"));
    let (Some(receive), Some(send)) = (limit("rmem_max"), limit("wmem_max")) else {
        return report(
            "socket buffers",
            Status::Info,
            "limits are not visible here (a network namespace of a container)",
            "ask for net.core.rmem_max and wmem_max on the host",
        );
    };
    let status = if receive.min(send) >= SOCKET_BUFFER_BYTES_WANTED {
        Status::Ok
    } else {
        Status::Warn
    };
    report(
        "socket buffers",
        status,
        format!(
            "receive at most {}, send at most {}",
            terminal::bytes(receive),
            terminal::bytes(send)
        ),
        format!(
            "sysctl -w net.core.rmem_max={SOCKET_BUFFER_BYTES_WANTED} net.core.wmem_max={SOCKET_BUFFER_BYTES_WANTED}"
        ),
    )
}

fn locked_memory() -> Check {
    let limit = getrlimit(Resource::Memlock).current;
    let found = limit.map_or("unlimited".to_owned(), |bytes| {
        format!("at most {}", terminal::bytes(bytes))
    });
    match limit {
        None => report("locked memory", Status::Ok, found, ""),
        Some(_) => report(
            "locked memory",
            Status::Info,
            format!("{found} (tcp needs none; rdma locks whole pools)"),
            "where rdma is used: ulimit -l unlimited, or LimitMEMLOCK=infinity in the service",
        ),
    }
}

fn open_files() -> Check {
    let limit = getrlimit(Resource::Nofile).current;
    let status = match limit {
        Some(files) if files < OPEN_FILES_WANTED => Status::Warn,
        _ => Status::Ok,
    };
    report(
        "open files",
        status,
        limit.map_or("unlimited".to_owned(), |files| format!("at most {files}")),
        format!("ulimit -n {OPEN_FILES_WANTED}: each peer takes a session and its lanes, three or more descriptors"),
    )
}

fn huge_pages() -> Check {
    let free = meminfo("HugePages_Free");
    let size = meminfo("Hugepagesize").map(|kib| kib << 10);
    match (free, size) {
        (Some(free), Some(size)) if free > 0 => report(
            "huge pages",
            Status::Ok,
            format!("{free} of {} free", terminal::bytes(size)),
            "",
        ),
        (_, size) => report(
            "huge pages",
            Status::Info,
            format!(
                "none reserved{}",
                size.map_or(String::new(), |size| format!(" (size {})", terminal::bytes(size)))
            ),
            "pools in huge pages copy faster: sysctl -w vm.nr_hugepages=N, and map them in the engine",
        ),
    }
}

fn transparent_huge_pages() -> Check {
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    let Ok(text) = std::fs::read_to_string(path) else {
        return report("transparent huge pages", Status::Info, "not in this kernel", "");
    };
    let chosen = text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
        .map_or("unknown", |(chosen, _)| chosen);
    let status = if chosen == "never" { Status::Info } else { Status::Ok };
    report(
        "transparent huge pages",
        status,
        chosen,
        format!("echo madvise > {path} lets engines ask for them"),
    )
}

/// What the verbs library and its devices say, under the settings of the environment.
fn rdma() -> Vec<Check> {
    let config = match Config::from_env() {
        Ok(config) => config,
        Err(error) => {
            return vec![report(
                "settings",
                Status::Fail,
                error.to_string(),
                "correct the variable",
            )];
        }
    };
    let library = &config.rdma.library;
    let found = probe::probe(&ProbeOptions {
        library: (!library.is_empty()).then(|| library.into()),
        devices: config.devices.clone(),
        gid_index: config.rdma.gid_index,
    });
    // Where there is no device, tcp is as it should be; where there is one, it is to be used.
    let refused = match found {
        Availability::Devices { .. } => Status::Warn,
        _ => Status::Info,
    };
    let check = |line: &probe::Line| {
        let status = match line.level {
            Level::Good => Status::Ok,
            Level::Note => Status::Info,
            Level::Warning => Status::Warn,
            Level::Refused => refused,
        };
        let found = format!("{:1$}{2}", "", 2 * line.depth, line.text);
        report("rdma", status, found, line.remedy.clone())
    };
    let mut checks: Vec<Check> = found.lines().iter().map(check).collect();
    match found.usable().count() {
        0 => checks.push(report("rdma", Status::Info, "not usable: hand-overs take tcp", "")),
        ports => {
            let ports = format!("usable, {ports} port{}", if ports == 1 { "" } else { "s" });
            checks.push(report("rdma", Status::Ok, ports, ""));
            checks.push(registrable());
        }
    }
    checks
}

/// Whether pools can be locked, which every registration does.
fn registrable() -> Check {
    const CAP_IPC_LOCK: u32 = 14;
    let capabilities = status_field("CapEff").and_then(|text| u64::from_str_radix(&text, 16).ok());
    let exempt = capabilities.is_some_and(|bits| bits >> CAP_IPC_LOCK & 1 == 1);
    match getrlimit(Resource::Memlock).current {
        None => report("rdma", Status::Ok, "pools of any size can be registered", ""),
        Some(_) if exempt => report(
            "rdma",
            Status::Ok,
            "pools of any size can be registered (CAP_IPC_LOCK: the limit of locked memory does not bind)",
            "",
        ),
        Some(bytes) => report(
            "rdma",
            Status::Warn,
            format!("pools above {} in all cannot be registered", terminal::bytes(bytes)),
            "ulimit -l unlimited, or LimitMEMLOCK=infinity in the service, or --ulimit memlock=-1 for the container",
        ),
    }
}

/// What the CUDA driver and its devices say, under the settings of the environment. Nothing is made on a device.
fn gpu() -> Vec<Check> {
    let config = Config::from_env().unwrap_or_default();
    let found = kvxfer_cuda::probe(&config.cuda);
    let module = std::fs::read_to_string("/proc/driver/nvidia/version")
        .ok()
        .and_then(|text| text.lines().next().map(str::to_owned));
    if found.refusal().is_none() {
        let text = found.to_string();
        let lines = text.lines().map(|line| {
            // A device whose memory network devices cannot reach is staged: it works, and could be better.
            let status = match line.contains("no dmabufs") {
                true => Status::Warn,
                false => Status::Ok,
            };
            report(
                "gpu",
                status,
                line,
                "over rdma its blocks are copied through host memory; see the cause",
            )
        });
        return lines.collect();
    }
    // Its line ends with what to do, if there is anything.
    let text = found.to_string();
    let text = text.trim_end().trim_start_matches("driver: ");
    let (found, remedy) = text.split_once("; ").unwrap_or((text, ""));
    let mut line = found.to_owned();
    // A machine without GPUs is as it should be; one with a kernel module has something to repair.
    let status = match module {
        Some(_) => Status::Warn,
        None => Status::Info,
    };
    if let Some(module) = module {
        line = format!("{line} ({module})");
    }
    vec![
        report("gpu", status, line, remedy),
        report("gpu", Status::Info, "not usable: pools are in host memory", ""),
    ]
}

fn process_namespace() -> Check {
    // The first process of the machine's own namespace is what started it; its scheduler statistics name it.
    let own = std::fs::read_link("/proc/self/ns/pid").map(|path| path.display().to_string());
    let container = Path::new("/.dockerenv").exists()
        || Path::new("/run/.containerenv").exists()
        || std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
    match (own, container) {
        (Ok(own), true) => report(
            "process namespace",
            Status::Info,
            format!("{own}, in a container"),
            "same-host transports that read another process's memory need a shared one (hostPID, --pid=host); tcp does not",
        ),
        (Ok(own), false) => report("process namespace", Status::Ok, own, ""),
        (Err(error), _) => report(
            "process namespace",
            Status::Info,
            format!("not visible: {error}"),
            "mount /proc",
        ),
    }
}

/// A field of this process's status.
fn status_field(key: &str) -> Option<String> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    Some(line.trim().to_owned())
}

fn number(path: &str) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn meminfo(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

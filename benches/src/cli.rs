//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kvxfer_core::{Error, ErrorKind, Result};

use crate::way::Way;
use crate::work::{self, Named, Pattern, Work};
use crate::{demo, doctor, figures, gpu_check, node, replay, run};

/// Demonstrates, measures, replays and diagnoses kvxfer, which hands KV caches over between processes.
#[derive(Debug, Parser)]
#[command(name = "kvxfer-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show hand-overs between real processes, with everything that can go wrong, and check every byte.
    Demo(DemoArgs),
    /// Measure between two processes on this machine.
    Run(RunArgs),
    /// Be the target of a `connect` on another machine: listen on ADDR for one run.
    Serve(ServeArgs),
    /// Measure against a `serve` at ADDR.
    Connect(ConnectArgs),
    /// Measure all figures of the benchmark table and say which targets are reached.
    Figures(FiguresArgs),
    /// Hand over the requests of a trace, every arrival verified.
    Replay(ReplayArgs),
    /// Say what this machine can do, and why not more.
    Doctor {
        /// One line of JSON per check.
        #[arg(long)]
        json: bool,
    },
    /// Check on a GPU what only a GPU can show: correctness under kernels, and figures against its limits.
    GpuCheck(GpuCheckArgs),
    /// A child process of the commands above.
    #[command(hide = true)]
    Peer { role: Role },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Role {
    Target,
    Node,
    ReplaySource,
    ReplayDestination,
    GpuNode,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// A tiny shape, for tests.
    #[arg(long)]
    pub(crate) small: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GpuCheckArgs {
    /// The driver's library: a path, or a name that the dynamic loader finds [default: libcuda.so.1].
    #[arg(long, default_value = "", hide_default_value = true)]
    pub(crate) library: String,
    /// The device's ordinal.
    #[arg(long, default_value_t = 0)]
    pub(crate) device: i32,
    /// Small workloads and no judgement of figures: for tests.
    #[arg(long)]
    pub(crate) quick: bool,
}

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Direction {
    /// The initiator writes into the target's blocks.
    Push,
    /// The initiator reads the target's blocks.
    Pull,
}

/// What to compare with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Baseline {
    /// A plain pair of blocking sockets moving the same pieces.
    Raw,
    /// perftest's ib_write_bw or ib_read_bw on the same device, with messages of the block size.
    Ib,
}

#[derive(Debug, Args)]
pub(crate) struct MeasureArgs {
    /// Transport: tcp or rdma, of which nothing else is fallen back to, or auto, which takes the best there is.
    #[arg(long, default_value = "auto")]
    pub(crate) transport: String,
    /// Devices, separated by commas: mlx5_0 (or mlx5_0:1, a port) for both sides, or ours=theirs [default: all].
    #[arg(long, value_delimiter = ',')]
    pub(crate) device: Vec<String>,
    /// Rails, at most [default: the library's].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub(crate) rails: Option<u16>,
    /// Which way the bytes go.
    #[arg(long, value_enum, default_value = "push")]
    pub(crate) direction: Direction,
    /// Named workloads, separated by commas [default: w5].
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with_all = ["model", "block_bytes"])]
    pub(crate) workload: Vec<Named>,
    /// One request of this model: a preset such as llama-3.1-70b.
    #[arg(long, requires = "tokens", conflicts_with = "block_bytes")]
    pub(crate) model: Option<String>,
    /// Tensor-parallel size of the model.
    #[arg(long, requires = "model", default_value_t = 1)]
    pub(crate) tp: u16,
    /// Tokens of the request.
    #[arg(long, requires = "model")]
    pub(crate) tokens: Option<u32>,
    /// Blocks of one's own size, such as 64K.
    #[arg(long, value_parser = size, requires = "blocks")]
    pub(crate) block_bytes: Option<u64>,
    /// How many of them.
    #[arg(long, requires = "block_bytes")]
    pub(crate) blocks: Option<u32>,
    /// How blocks are chosen.
    #[arg(long, value_enum, default_value = "random")]
    pub(crate) pattern: Pattern,
    /// Bytes of the pool on each side, in touched 4 KiB pages.
    #[arg(long, value_parser = size, default_value = "1GiB")]
    pub(crate) pool_bytes: u64,
    /// Put so few bytes of memory behind each pool, again and again: perftest has one message of it, which stays in the
    /// cache. Nothing is checked then.
    #[arg(long, value_parser = size, conflicts_with_all = ["verify"])]
    pub(crate) window_bytes: Option<u64>,
    /// Timed repetitions [default: the workload's; 9 against ib].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) reps: Option<u32>,
    /// Repetitions before those [default: the workload's; 1 against ib].
    #[arg(long)]
    pub(crate) warm: Option<u32>,
    /// Check every byte of the destination pool at the end, and that nothing else changed.
    #[arg(long)]
    pub(crate) verify: bool,
    /// Measure this too, interleaved in the same run, and print the ratio.
    #[arg(long, value_enum)]
    pub(crate) against: Option<Baseline>,
    /// Seconds to wait in all, per workload, for others to leave the processors alone.
    #[arg(long, default_value_t = 10)]
    pub(crate) patience: u64,
    /// One line of JSON per result.
    #[arg(long)]
    pub(crate) json: bool,
    /// Wait for a line on standard input before each repetition and print one of JSON after it, so that another
    /// benchmark can take turns with this one.
    #[arg(long, requires = "json", conflicts_with = "against")]
    pub(crate) paced: bool,
}

impl MeasureArgs {
    /// The workloads asked for.
    pub(crate) fn works(&self) -> Result<Vec<Work>> {
        if let Some(model) = &self.model {
            let tokens = self.tokens.unwrap_or(0);
            return Ok(vec![work::model(
                self.pool_bytes,
                model,
                self.tp,
                tokens,
                self.pattern,
            )?]);
        }
        if let Some(block_bytes) = self.block_bytes {
            let blocks = self.blocks.unwrap_or(0);
            return Ok(vec![work::custom(self.pool_bytes, block_bytes, blocks, self.pattern)?]);
        }
        let named = match self.workload.as_slice() {
            [] => &[Named::W5],
            named => named,
        };
        named.iter().map(|named| named.work(self.pool_bytes)).collect()
    }

    /// How long to wait for others. Not at all where soft-RoCE's own kernel threads would be taken for others.
    pub(crate) fn patience(&self) -> Duration {
        match self.against {
            Some(Baseline::Ib) => Duration::ZERO,
            _ => Duration::from_secs(self.patience),
        }
    }

    /// Our way to the target, and the target's to us.
    pub(crate) fn ways(&self) -> Result<(Way, Way)> {
        Way::both(&self.transport, &self.device, self.rails)
    }
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Address to wait on, such as 10.0.0.2:7700.
    pub(crate) address: SocketAddr,
    /// Allow addresses beyond loopback: nothing is authenticated or encrypted in this build.
    #[arg(long)]
    pub(crate) insecure_network: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ConnectArgs {
    /// Address that `serve` waits on.
    pub(crate) address: SocketAddr,
    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
    /// Allow addresses beyond loopback: nothing is authenticated or encrypted in this build.
    #[arg(long)]
    pub(crate) insecure_network: bool,
}

#[derive(Debug, Args)]
pub(crate) struct FiguresArgs {
    /// Transport, by name.
    #[arg(long, default_value = "tcp")]
    pub(crate) transport: String,
    /// Bytes of the pool on each side; the targets are stated for 1 GiB.
    #[arg(long, value_parser = size, default_value = "1GiB")]
    pub(crate) pool_bytes: u64,
    /// Timed repetitions [default: each workload's].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) reps: Option<u32>,
    /// Bytes of the large hand-off that a small one waits behind.
    #[arg(long, value_parser = size, default_value = "5GB")]
    pub(crate) large_bytes: u64,
    /// Seconds to wait in all, per workload, for others to leave the processors alone.
    #[arg(long, default_value_t = 10)]
    pub(crate) patience: u64,
    /// One line of JSON per figure.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// The trace: JSON lines (.jsonl) or CSV (.csv).
    pub(crate) trace: PathBuf,
    /// Times faster than the trace, or `max`.
    #[arg(long, default_value = "max", value_parser = speed)]
    pub(crate) speed: Speed,
    /// Requests, at most.
    #[arg(long, default_value_t = 200)]
    pub(crate) requests: usize,
    /// Cache bytes per token: a multiple of 512.
    #[arg(long, value_parser = size, default_value = "4096", conflicts_with = "model")]
    pub(crate) kv_bytes_per_token: u64,
    /// Take the cache of this model instead.
    #[arg(long)]
    pub(crate) model: Option<String>,
    /// Tensor-parallel size of the model.
    #[arg(long, requires = "model", default_value_t = 1)]
    pub(crate) tp: u16,
    /// Transport, by name.
    #[arg(long, default_value = "tcp")]
    pub(crate) transport: String,
    /// Pull instead of push.
    #[arg(long)]
    pub(crate) pull: bool,
    /// Bytes of the pool on each side.
    #[arg(long, value_parser = size, default_value = "512MiB")]
    pub(crate) pool_bytes: u64,
    /// Skip what the decode side would still hold of shared prefixes (hash ids), remembering so many of them.
    #[arg(long, default_value_t = 0)]
    pub(crate) held_prefixes: usize,
    /// One line of JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// How fast a trace goes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Speed {
    /// So many times faster than it was.
    Times(f64),
    /// As fast as the pools allow.
    Max,
}

/// Parses the command line and runs the command.
pub(crate) fn main() -> ExitCode {
    let cli = Cli::parse();
    match dispatch(cli.command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            // A plain write: a closed standard error is no reason to panic.
            let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("kvxfer-bench: {error}\n"));
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: Command) -> Result<bool> {
    match command {
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Run(arguments) => run::local(&arguments.measure),
        Command::Serve(arguments) => run::serve(&arguments).map(|()| true),
        Command::Connect(arguments) => run::connect(&arguments),
        Command::Figures(arguments) => figures::run(&arguments),
        Command::Replay(arguments) => replay::run(&arguments),
        Command::Doctor { json } => doctor::run(json),
        Command::GpuCheck(arguments) => gpu_check::run(&arguments),
        Command::Peer { role } => {
            match role {
                Role::Target => run::target()?,
                Role::Node => node::serve()?,
                Role::ReplaySource => replay::source()?,
                Role::ReplayDestination => replay::destination()?,
                Role::GpuNode => gpu_check::serve()?,
            }
            Ok(true)
        }
    }
}

/// Refuses what would reach beyond this machine without saying so.
pub(crate) fn check_network(address: SocketAddr, insecure_network: bool) -> Result<()> {
    if address.ip().is_loopback() || insecure_network {
        return Ok(());
    }
    Err(
        Error::new(ErrorKind::Unauthenticated, format!("{address} is not on loopback"))
            .because("this build neither authenticates nor encrypts")
            .remedy("on a network that you trust, give --insecure-network on both sides"),
    )
}

/// A size: a number with an optional unit, K, M, G (of 1024) or KB, MB, GB (of 1000).
fn size(text: &str) -> Result<u64, String> {
    let expected = "expected a number of bytes such as 65536, 64K, 64KiB, 1GiB or 5GB";
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        _ => return Err(format!("the unit {unit:?} is unknown; {expected}")),
    };
    let number: u64 = number.parse().map_err(|_| expected.to_owned())?;
    number
        .checked_mul(factor)
        .ok_or_else(|| format!("it does not fit 64 bits; {expected}"))
}

fn speed(text: &str) -> Result<Speed, String> {
    if text == "max" {
        return Ok(Speed::Max);
    }
    match text.parse::<f64>() {
        Ok(times) if times.is_finite() && times > 0.0 => Ok(Speed::Times(times)),
        _ => Err("expected a positive number, such as 10 for ten times the trace's speed, or max".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(size("64K"), Ok(65_536));
        assert_eq!(size("1GiB"), Ok(1 << 30));
        assert_eq!(size("5GB"), Ok(5_000_000_000));
        assert_eq!(size("7"), Ok(7));
        for bad in ["", "K", "1.5G", "3 parsecs", "99999999999G"] {
            assert!(size(bad).unwrap_err().contains("expected"), "{bad}");
        }
    }

    #[test]
    fn speeds_are_positive() {
        assert_eq!(speed("max"), Ok(Speed::Max));
        assert_eq!(speed("2.5"), Ok(Speed::Times(2.5)));
        for bad in ["0", "-1", "fast", "inf", "NaN"] {
            assert!(speed(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_network_is_only_used_in_words() {
        assert!(check_network("127.0.0.1:1".parse().unwrap(), false).is_ok());
        let error = check_network("10.0.0.1:1".parse().unwrap(), false).unwrap_err();
        assert!(error.to_string().contains("--insecure-network"));
        assert!(check_network("10.0.0.1:1".parse().unwrap(), true).is_ok());
    }
}

//! `--against ib`: perftest's `ib_write_bw` and `ib_read_bw` between the same two devices, as a mover among the others.
//!
//! One repetition is one run of both programs that moves as many bytes, in messages of the workload's block size. The
//! server runs beside the target and the client beside the initiator. Reads use completion events (`-e`); writes cannot:
//! perftest refuses events for WRITE in every version, its client polls, and its server sleeps.

use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use kvxfer_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::work::Work;

/// Longest message: what the library puts into one work request, at most.
const MESSAGE_BYTES_MAX: u64 = 1 << 20;
/// How long the server may take until it listens.
const LISTEN_MAX: Duration = Duration::from_secs(10);
/// How long one run may take.
const RUN_MAX: Duration = Duration::from_secs(120);
/// How often a run is tried that cannot tell its own rate.
pub(crate) const ATTEMPTS_MAX: u32 = 10;
/// perftest makes no fewer.
const ITERATIONS_MIN: u64 = 5;
/// What "MB" means in its table.
const MEBIBYTE: f64 = (1 << 20) as f64;

/// Which of the programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Program {
    /// `ib_write_bw`.
    Write,
    /// `ib_read_bw`.
    Read,
}

impl Program {
    /// Its file.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Program::Write => "ib_write_bw",
            Program::Read => "ib_read_bw",
        }
    }

    /// Says whether it can be started.
    pub(crate) fn check(self) -> Result<()> {
        let mut command = Command::new(self.name());
        command.arg("--version").stdin(Stdio::null());
        let output = command.output().map_err(|error| self.missing(&error))?;
        // It says its version on standard output and ends with an error.
        match String::from_utf8_lossy(&output.stdout).contains("Version") {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Unsupported, self.name())
                .because(format!(
                    "--version says {:?}, and {}",
                    String::from_utf8_lossy(&output.stdout).trim(),
                    String::from_utf8_lossy(&output.stderr).trim()
                ))
                .remedy("install perftest as the distribution has it")),
        }
    }

    fn missing(self, error: &std::io::Error) -> Error {
        Error::new(ErrorKind::Unsupported, format!("{} cannot be started", self.name()))
            .because(error.to_string())
            .remedy("install perftest (apt-get install perftest), or leave --against ib out")
    }
}

/// One run, the same on both sides but for the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) program: Program,
    /// Bytes of a message.
    pub(crate) message_bytes: u64,
    /// Messages.
    pub(crate) iterations: u64,
    /// Work requests outstanding at most.
    pub(crate) depth: u32,
}

impl Run {
    /// As many bytes as the workload, in messages of its blocks.
    pub(crate) fn of(program: Program, work: &Work, depth: u32) -> Run {
        let message_bytes = work.shape.block_bytes.min(MESSAGE_BYTES_MAX);
        Run {
            program,
            message_bytes,
            iterations: work.bytes().div_ceil(message_bytes).max(ITERATIONS_MIN),
            depth,
        }
    }

    fn command(&self, device: &str, port: u16) -> Result<Command> {
        let mut command = Command::new(self.program.name());
        // Without the peak, of which it would take the time at every message.
        let (device, device_port) = device.split_once(':').unwrap_or((device, "1"));
        command.args(["-F", "-N", "-d", device, "-i", device_port]);
        command.args([
            "-s",
            &self.message_bytes.to_string(),
            "-n",
            &self.iterations.to_string(),
        ]);
        command.args(["-t", &self.depth.to_string(), "-p", &port.to_string()]);
        if self.program == Program::Read {
            command.arg("-e");
        }
        if let Some(index) = gid_index(device, device_port)? {
            command.args(["-x", &index.to_string()]);
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Ok(command)
    }

    /// Starts the server's half, and waits until it listens.
    pub(crate) fn serve(&self, device: &str) -> Result<Process> {
        let port = TcpListener::bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)))
            .and_then(|listener| listener.local_addr())
            .map_err(|error| Error::new(ErrorKind::Transport, "a free port").because(error.to_string()))?
            .port();
        let mut process = Process::start(self.program, self.command(device, port)?, port)?;
        let deadline = Instant::now() + LISTEN_MAX;
        // It serves the first that connects, so that trying would be taken for the client.
        while !listens(port) {
            if let Some(status) = process.ended()? {
                return Err(process.failed(status));
            }
            if Instant::now() > deadline {
                return Err(process.late(LISTEN_MAX));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(process)
    }

    /// Runs the client's half; gives the bytes per second. `None` if it could not tell the rate of the processor's clock,
    /// which it estimates anew each time: then it shows 0.
    pub(crate) fn measure(&self, device: &str, server: IpAddr, port: u16) -> Result<Option<f64>> {
        let mut command = self.command(device, port)?;
        command.arg(server.to_string());
        let said = Process::start(self.program, command, port)?.finish()?;
        let rate = self.rate(&said).ok_or_else(|| {
            Error::new(
                ErrorKind::Protocol,
                format!("what {} printed is not understood", self.program.name()),
            )
            .because(said.trim().to_owned())
            .remedy("report its version with this output")
        })?;
        Ok((rate > 0.0).then_some(rate))
    }

    /// Bytes per second from its table: a row of size, iterations, peak, average and messages.
    fn rate(&self, said: &str) -> Option<f64> {
        let mut lines = said.lines();
        let header = lines.find(|line| line.contains("#bytes") && line.contains("BW average"))?;
        if !header.contains("BW average[MB/sec]") && !header.contains("BW average[MiB/sec]") {
            return None;
        }
        let row: Vec<&str> = lines.next()?.split_whitespace().collect();
        let [bytes, iterations, _, average, ..] = row.as_slice() else {
            return None;
        };
        let same = bytes.parse() == Ok(self.message_bytes) && iterations.parse() == Ok(self.iterations);
        let rate = average.parse::<f64>().ok()? * MEBIBYTE;
        (same && rate >= 0.0 && rate.is_finite()).then_some(rate)
    }
}

/// One of its processes; killed if it is dropped before it ended.
pub(crate) struct Process {
    program: Program,
    child: Child,
    port: u16,
}

impl Process {
    fn start(program: Program, mut command: Command, port: u16) -> Result<Process> {
        let child = command.spawn().map_err(|error| program.missing(&error))?;
        Ok(Process { program, child, port })
    }

    /// The port that the two exchange their keys by.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Waits for its end; gives what it printed. That is little: it fits the pipe.
    pub(crate) fn finish(mut self) -> Result<String> {
        let deadline = Instant::now() + RUN_MAX;
        loop {
            match self.ended()? {
                Some(status) if status.success() => {
                    let mut said = String::new();
                    if let Some(mut out) = self.child.stdout.take() {
                        let _ = out.read_to_string(&mut said);
                    }
                    return Ok(said);
                }
                Some(status) => return Err(self.failed(status)),
                None if Instant::now() > deadline => return Err(self.late(RUN_MAX)),
                // Seldom: one processor may be all there is.
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().map_err(|error| {
            Error::new(ErrorKind::Internal, format!("waiting for {}", self.program.name())).because(error.to_string())
        })
    }

    fn failed(&mut self, status: ExitStatus) -> Error {
        let mut said = String::new();
        if let Some(mut out) = self.child.stdout.take() {
            let _ = out.read_to_string(&mut said);
        }
        if let Some(mut out) = self.child.stderr.take() {
            let _ = out.read_to_string(&mut said);
        }
        Error::new(ErrorKind::Transport, format!("{} failed", self.program.name()))
            .because(format!("{status}: {}", said.trim()))
            .remedy("check the device, and the locked-memory limit (ulimit -l)")
    }

    fn late(&mut self, limit: Duration) -> Error {
        Error::new(ErrorKind::DeadlineExceeded, self.program.name())
            .because(format!("it did not come so far within {limit:?}"))
            .remedy("use a smaller workload")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a TCP socket of this machine listens on the port.
fn listens(port: u16) -> bool {
    let wanted = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|path| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines().skip(1).any(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let (local, _, state) = (fields.next(), fields.next(), fields.next());
            local.is_some_and(|local| local.ends_with(&wanted)) && state == Some("0A")
        })
    })
}

/// The index of a RoCE v2 GID with an IPv4 address, on Ethernet; nothing to choose on InfiniBand.
fn gid_index(device: &str, port: &str) -> Result<Option<u32>> {
    let port = format!("/sys/class/infiniband/{device}/ports/{port}");
    let read = |name: &str| std::fs::read_to_string(format!("{port}/{name}"));
    let layer = read("link_layer").map_err(|error| {
        Error::new(ErrorKind::Unsupported, format!("device {device}"))
            .at(port.clone())
            .because(error.to_string())
            .remedy("see kvxfer-bench doctor for the devices there are")
    })?;
    if layer.trim() == "InfiniBand" {
        return Ok(None);
    }
    let is_ipv4 = |gid: &str| gid.starts_with("0000:0000:0000:0000:0000:ffff:");
    // The table is short where it is used at all, and reading an empty entry costs little.
    let found = (0..256).find(|index| {
        let routable = read(&format!("gid_attrs/types/{index}")).is_ok_and(|kind| kind.trim() == "RoCE v2");
        routable && read(&format!("gids/{index}")).is_ok_and(|gid| is_ipv4(&gid))
    });
    found.map(Some).ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, format!("device {device}"))
            .at(port.clone())
            .because("it has no RoCE v2 GID with an IPv4 address")
            .remedy("give its interface an IPv4 address")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::Named;

    const SAID: &str = "\
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 GID index       : 1
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      4096             0.00               512.00 \t\t   0.004996
---------------------------------------------------------------------------------------
";

    fn run() -> Run {
        Run::of(Program::Write, &Named::W2.work(1 << 30).unwrap(), 512)
    }

    #[test]
    fn it_moves_the_bytes_of_the_workload() {
        assert_eq!((run().message_bytes, run().iterations), (65_536, 4_096));
        let whole = Run::of(Program::Read, &Named::W1.work(1 << 30).unwrap(), 512);
        assert_eq!((whole.message_bytes, whole.iterations), (1 << 20, 1024));
        let small = Run::of(Program::Read, &Named::W4.work(4096).unwrap(), 512);
        assert_eq!((small.message_bytes, small.iterations), (4096, 5));
    }

    #[test]
    fn its_table_is_read_and_nothing_else_is() {
        assert_eq!(run().rate(SAID), Some(512.0 * 1_048_576.0));
        assert_eq!(
            run().rate(&SAID.replace("MB/sec", "MiB/sec")),
            Some(512.0 * 1_048_576.0)
        );
        for (from, to) in [
            ("MB/sec", "Gb/sec"),
            ("65536", "8192"),
            ("4096 ", "4095 "),
            ("512.00", "inf"),
            ("512.00", "fast"),
            ("#bytes", ""),
        ] {
            assert_eq!(run().rate(&SAID.replace(from, to)), None, "{from} as {to}");
        }
        assert_eq!(run().rate(""), None);
        assert_eq!(run().rate(&SAID.replace("512.00", "0.00")), Some(0.0));
    }

    #[test]
    fn who_listens_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(listens(port));
        drop(listener);
        assert!(!listens(port));
    }

    #[test]
    fn a_device_that_is_not_there_is_named() {
        let error = gid_index("nosuch0", "1").unwrap_err().to_string();
        assert!(error.contains("nosuch0") && error.contains("doctor"), "{error}");
    }
}

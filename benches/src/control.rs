//! The control line between the benchmark's processes: JSON lines over pipes (children) or a TCP connection.
//!
//! Every wait has a deadline, a process that dies is reported with how it ended, and a child never outlives its
//! [`Child`].

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use kvxfer_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, poll};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Bytes of one control message, at most.
const LINE_BYTES_MAX: usize = 64 << 20;
/// How long a child may take to end by itself once its control line is closed.
const END_MAX: Duration = Duration::from_secs(5);

/// One end of the control line.
pub(crate) struct Channel {
    reader: OwnedFd,
    writer: OwnedFd,
    received: Vec<u8>,
    other: String,
}

/// An answer: what was asked for, or the other side's error.
#[derive(Serialize, Deserialize)]
enum Answer<T> {
    Ok(T),
    Failed(Error),
}

impl Channel {
    /// Over a pair of descriptors; `other` names who is at the other end.
    pub(crate) fn new(reader: OwnedFd, writer: OwnedFd, other: impl Into<String>) -> Self {
        Channel {
            reader,
            writer,
            received: Vec::new(),
            other: other.into(),
        }
    }

    /// A child's own end: its standard input and output.
    pub(crate) fn of_this_child() -> Result<Self> {
        let dup = |fd: std::os::fd::BorrowedFd<'_>| {
            fd.try_clone_to_owned()
                .map_err(|error| failed("taking over the standard streams", &error))
        };
        Ok(Channel::new(
            dup(std::io::stdin().as_fd())?,
            dup(std::io::stdout().as_fd())?,
            "the parent process",
        ))
    }

    /// Connects to `kvxfer-bench serve`.
    pub(crate) fn connect(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&address, Duration::from_secs(5)).map_err(|error| {
            Error::new(ErrorKind::Unreachable, format!("kvxfer-bench at {address}"))
                .because(error.to_string())
                .remedy(format!("start `kvxfer-bench serve {address}` on that machine first"))
        })?;
        Channel::over(stream, address)
    }

    /// Waits for `kvxfer-bench connect`.
    pub(crate) fn accept(listener: &TcpListener) -> Result<Self> {
        let (stream, from) = listener.accept().map_err(|error| failed("accepting", &error))?;
        Channel::over(stream, from)
    }

    fn over(stream: TcpStream, other: SocketAddr) -> Result<Self> {
        stream
            .set_nodelay(true)
            .map_err(|error| failed("setting TCP_NODELAY", &error))?;
        let writer = stream
            .try_clone()
            .map_err(|error| failed("duplicating a socket", &error))?;
        Ok(Channel::new(
            stream.into(),
            writer.into(),
            format!("the side at {other}"),
        ))
    }

    /// Sends a request.
    pub(crate) fn send<T: Serialize>(&mut self, message: &T) -> Result<()> {
        let mut line = serde_json::to_vec(message)
            .map_err(|error| Error::new(ErrorKind::Internal, "a control message").because(error.to_string()))?;
        line.push(b'\n');
        let mut rest = line.as_slice();
        while !rest.is_empty() {
            match rustix::io::write(&self.writer, rest) {
                Ok(count) => rest = &rest[count..],
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(self.gone(&errno.to_string())),
            }
        }
        Ok(())
    }

    /// Receives a request; `None` if the other side closed the line between two of them.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self, timeout: Duration) -> Result<Option<T>> {
        let Some(line) = self.line(timeout)? else {
            return Ok(None);
        };
        serde_json::from_slice(&line).map(Some).map_err(|error| {
            let shown: String = String::from_utf8_lossy(&line).chars().take(120).collect();
            Error::new(ErrorKind::Protocol, "a control message")
                .at(format!("from {}: {shown}", self.other))
                .because(error.to_string())
                .remedy("run the same version of kvxfer-bench on both sides")
        })
    }

    /// Answers a request with a value or an error.
    pub(crate) fn answer<T: Serialize>(&mut self, result: Result<T>) -> Result<()> {
        self.send(&match result {
            Ok(value) => Answer::Ok(value),
            Err(error) => Answer::Failed(error),
        })
    }

    /// Receives an answer.
    pub(crate) fn answered<T: DeserializeOwned>(&mut self, timeout: Duration) -> Result<T> {
        match self.receive::<Answer<T>>(timeout)? {
            Some(Answer::Ok(value)) => Ok(value),
            Some(Answer::Failed(error)) => Err(error),
            None => Err(self.gone("it closed the control line")),
        }
    }

    /// Sends a request and waits for its answer.
    pub(crate) fn ask<Q: Serialize, T: DeserializeOwned>(&mut self, request: &Q, timeout: Duration) -> Result<T> {
        self.send(request)?;
        self.answered(timeout)
    }

    fn line(&mut self, timeout: Duration) -> Result<Option<Vec<u8>>> {
        let deadline = Instant::now() + timeout;
        let mut scanned = 0;
        loop {
            if let Some(at) = self.received[scanned..].iter().position(|&byte| byte == b'\n') {
                let rest = self.received.split_off(scanned + at + 1);
                let mut line = std::mem::replace(&mut self.received, rest);
                line.pop();
                return Ok(Some(line));
            }
            scanned = self.received.len();
            if scanned > LINE_BYTES_MAX {
                return Err(Error::new(
                    ErrorKind::Protocol,
                    format!("a control message over {LINE_BYTES_MAX} bytes"),
                )
                .at(format!("from {}", self.other)));
            }
            if !self.wait_readable(deadline)? {
                return Err(Error::new(
                    ErrorKind::DeadlineExceeded,
                    format!("{} did not answer within {timeout:?}", self.other),
                )
                .remedy("look at what it prints; on a loaded machine use a smaller workload"));
            }
            let mut buffer = [0; 64 << 10];
            match rustix::io::read(&self.reader, &mut buffer) {
                Ok(0) if self.received.is_empty() => return Ok(None),
                Ok(0) => return Err(self.gone("it ended in the middle of a message")),
                Ok(count) => self.received.extend_from_slice(&buffer[..count]),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(self.gone(&errno.to_string())),
            }
        }
    }

    fn wait_readable(&self, deadline: Instant) -> Result<bool> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut polled = [PollFd::new(&self.reader, PollFlags::IN)];
            let timeout = rustix::time::Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            };
            match poll(&mut polled, Some(&timeout)) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(self.gone(&errno.to_string())),
            }
        }
    }

    fn gone(&self, why: &str) -> Error {
        Error::new(ErrorKind::PeerLost, self.other.clone()).because(why)
    }
}

/// A process of ours: another role of this very program.
pub(crate) struct Child {
    process: std::process::Child,
    channel: Channel,
    name: String,
}

impl Child {
    /// Starts this program again with these arguments.
    pub(crate) fn start(name: &str, arguments: &[&str]) -> Result<Child> {
        let program = std::env::current_exe().map_err(|error| failed("finding this program's file", &error))?;
        let mut process = Command::new(&program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| {
                Error::new(ErrorKind::ResourceExhausted, format!("the {name} process"))
                    .at(program.display().to_string())
                    .because(error.to_string())
            })?;
        let (Some(input), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(Error::new(ErrorKind::Internal, "a child without pipes"));
        };
        let channel = Channel::new(
            output.into(),
            input.into(),
            format!("the {name} process (pid {})", process.id()),
        );
        Ok(Child {
            process,
            channel,
            name: name.to_owned(),
        })
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends a request.
    pub(crate) fn send<Q: Serialize>(&mut self, request: &Q) -> Result<()> {
        let sent = self.channel.send(request);
        self.explained(sent)
    }

    /// Receives an answer.
    pub(crate) fn answered<T: DeserializeOwned>(&mut self, timeout: Duration) -> Result<T> {
        let answer = self.channel.answered(timeout);
        self.explained(answer)
    }

    /// Sends a request and waits for its answer.
    pub(crate) fn ask<Q: Serialize, T: DeserializeOwned>(&mut self, request: &Q, timeout: Duration) -> Result<T> {
        self.send(request)?;
        self.answered(timeout)
    }

    /// Kills it as the kernel would for lack of memory, and reaps it.
    pub(crate) fn kill(&mut self) -> Result<ExitStatus> {
        self.process
            .kill()
            .and_then(|()| self.process.wait())
            .map_err(|error| failed(&format!("killing the {} process", self.name), &error))
    }

    /// Says how the process ended, if that is why its control line broke.
    fn explained<T>(&mut self, result: Result<T>) -> Result<T> {
        result.map_err(|error| {
            // Only errors about the line itself: an answer may carry a `PeerLost` of its own.
            if error.kind() != ErrorKind::PeerLost || !error.what().starts_with("the ") {
                return error;
            }
            let end = self.end_within(Duration::from_millis(500));
            let how = match end {
                Some(status) => format!("it ended with {status}"),
                None => error.to_string(),
            };
            Error::new(
                ErrorKind::PeerLost,
                format!("the {} process (pid {})", self.name, self.process.id()),
            )
            .because(how)
            .remedy("look at what it printed above")
        })
    }

    fn end_within(&mut self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            match self.process.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                _ => return None,
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Closing its input tells it to end; it is killed if it does not. Reaped in either case.
        if let Ok(null) = std::fs::File::open("/dev/null") {
            self.channel.writer = null.into();
        }
        if self.end_within(END_MAX).is_none() {
            let _ = self.kill();
        }
    }
}

/// Serves the parent's requests until it closes the line. An error of a request goes back as its answer.
pub(crate) fn serve_parent<Q: DeserializeOwned>(mut handle: impl FnMut(Q, &mut Channel) -> Result<()>) -> Result<()> {
    let mut channel = Channel::of_this_child()?;
    // The parent closes the line when it ends, however it ends: no shorter limit is needed.
    while let Some(request) = channel.receive::<Q>(Duration::from_secs(24 * 3600))? {
        handle(request, &mut channel)?;
    }
    Ok(())
}

fn failed(what: &str, error: &std::io::Error) -> Error {
    Error::new(ErrorKind::Transport, what)
        .at("the control line")
        .because(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Channel, Channel) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let other = std::thread::spawn(move || Channel::connect(address).unwrap());
        let accepted = Channel::accept(&listener).unwrap();
        (accepted, other.join().unwrap())
    }

    #[test]
    fn requests_and_answers_cross() {
        let (mut here, mut there) = pair();
        here.send(&vec![1, 2, 3]).unwrap();
        here.send(&vec![4]).unwrap();
        let limit = Duration::from_secs(5);
        assert_eq!(there.receive::<Vec<u32>>(limit).unwrap(), Some(vec![1, 2, 3]));
        assert_eq!(there.receive::<Vec<u32>>(limit).unwrap(), Some(vec![4]));
        there.answer(Ok(7)).unwrap();
        assert_eq!(here.answered::<u32>(limit).unwrap(), 7);
        there
            .answer::<u32>(Err(Error::new(ErrorKind::Busy, "something")))
            .unwrap();
        assert_eq!(here.answered::<u32>(limit).unwrap_err().kind(), ErrorKind::Busy);
    }

    #[test]
    fn silence_garbage_and_the_end_are_told_apart() {
        let (mut here, mut there) = pair();
        let short = Duration::from_millis(20);
        assert_eq!(
            here.receive::<u32>(short).unwrap_err().kind(),
            ErrorKind::DeadlineExceeded
        );
        there.send(&"text").unwrap();
        let error = here.receive::<u32>(Duration::from_secs(5)).unwrap_err();
        assert!(error.kind() == ErrorKind::Protocol && error.to_string().contains("text"));
        drop(there);
        assert_eq!(here.receive::<u32>(Duration::from_secs(5)).unwrap(), None);
    }
}

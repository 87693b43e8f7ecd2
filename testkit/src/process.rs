//! Child processes for fault tests: a test starts its own binary again in another role, talks to it line by line,
//! and kills, stops and continues it by its process id.
//!
//! ```no_run
//! use kvxfer_testkit::process::{ChildProcess, role};
//! use std::time::Duration;
//!
//! // #[test] #[ignore = "started by other tests"]
//! fn child_main() {
//!     if role().as_deref() == Some("decode") { println!("ready 127.0.0.1:7700"); }
//! }
//! // #[test]
//! fn survives_the_death_of_its_peer() {
//!     let mut child = ChildProcess::test("child_main", "decode", &[]).unwrap();
//!     let line = child.expect_line("ready", Duration::from_secs(5)).unwrap();
//!     child.kill();
//! }
//! ```

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

const ROLE: &str = "KVXTEST_ROLE";
const POLL: Duration = Duration::from_millis(2);

/// The role this process was started in by [`ChildProcess::test`], if it was.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// A child process with its lines of output. Killed and reaped when dropped.
#[derive(Debug)]
pub struct ChildProcess {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl ChildProcess {
    /// Starts this test binary again, to run only the (ignored) test `test` in the given role, with more variables
    /// in its environment. Its standard error is ours.
    ///
    /// # Errors
    /// What the system says when it cannot start a process.
    pub fn test(test: &str, role: &str, variables: &[(&str, &str)]) -> io::Result<ChildProcess> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--exact", test, "--nocapture", "--include-ignored", "--test-threads=1"]);
        command.env(ROLE, role);
        command.envs(variables.iter().copied());
        ChildProcess::start(command)
    }

    /// Starts any command, with its standard input and output piped.
    ///
    /// # Errors
    /// What the system says when it cannot start a process.
    pub fn start(mut command: Command) -> io::Result<ChildProcess> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take();
        let (send, lines) = channel();
        if let Some(output) = child.stdout.take() {
            std::thread::Builder::new().name("child-output".into()).spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if send.send(line).is_err() {
                        return;
                    }
                }
            })?;
        }
        Ok(ChildProcess {
            child,
            input,
            lines,
            seen: Vec::new(),
        })
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line that contains `word` (test harness noise may precede it on the same line) and gives the
    /// line from that word on.
    ///
    /// # Errors
    /// `TimedOut` or `UnexpectedEof`, with everything the child has said.
    pub fn expect_line(&mut self, word: &str, timeout: Duration) -> io::Result<String> {
        let end = Instant::now() + timeout;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let (kind, words) = match self.lines.recv_timeout(left) {
                Ok(line) => {
                    if let Some(position) = line.find(word) {
                        return Ok(line[position..].to_owned());
                    }
                    self.seen.push(line);
                    continue;
                }
                Err(RecvTimeoutError::Timeout) => (io::ErrorKind::TimedOut, "said nothing with"),
                Err(RecvTimeoutError::Disconnected) => (io::ErrorKind::UnexpectedEof, "ended without"),
            };
            let said = self.seen.join("\n");
            return Err(io::Error::new(
                kind,
                format!("child {} {words} {word:?}; it said:\n{said}", self.child.id()),
            ));
        }
    }

    /// Sends a line to the child's standard input.
    ///
    /// # Errors
    /// `BrokenPipe` if the child is gone.
    pub fn say(&mut self, line: &str) -> io::Result<()> {
        let input = self.input.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        writeln!(input, "{line}")?;
        input.flush()
    }

    /// Kills it at once (SIGKILL) and reaps it. Nothing happens if it has ended.
    pub fn kill(&mut self) {
        // Either may fail only because it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Stops it (SIGSTOP) and waits until it really is stopped.
    ///
    /// # Errors
    /// `NotFound` if it has ended, `TimedOut` after 5 s.
    pub fn stop(&self) -> io::Result<()> {
        self.signal(Signal::STOP)?;
        self.await_change(WaitOptions::UNTRACED)
    }

    /// Continues it (SIGCONT) after [`stop`](Self::stop).
    ///
    /// # Errors
    /// `NotFound` if it has ended.
    pub fn resume(&self) -> io::Result<()> {
        self.signal(Signal::CONT)
    }

    /// Waits until it ends by itself.
    ///
    /// # Errors
    /// `TimedOut` if it does not.
    pub fn wait(&mut self, timeout: Duration) -> io::Result<ExitStatus> {
        let end = Instant::now() + timeout;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > end {
                let words = format!("child {} still runs after {timeout:?}", self.child.id());
                return Err(io::Error::new(io::ErrorKind::TimedOut, words));
            }
            std::thread::sleep(POLL);
        }
    }

    fn pid(&self) -> io::Result<Pid> {
        Pid::from_raw(self.child.id() as i32).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(kill_process(self.pid()?, signal)?)
    }

    fn await_change(&self, options: WaitOptions) -> io::Result<()> {
        let end = Instant::now() + Duration::from_secs(5);
        let pid = self.pid()?;
        while Instant::now() < end {
            if waitpid(Some(pid), options | WaitOptions::NOHANG)?.is_some() {
                return Ok(());
            }
            std::thread::sleep(POLL);
        }
        Err(io::ErrorKind::TimedOut.into())
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "started by the test below"]
    fn child_main() {
        if role().as_deref() != Some("echo") {
            return;
        }
        let mut stdout = io::stdout();
        writeln!(stdout, "ready").unwrap();
        for line in io::stdin().lines() {
            writeln!(stdout, "heard {}", line.unwrap()).unwrap();
        }
    }

    #[test]
    fn a_child_speaks_stops_continues_and_dies() {
        let second = Duration::from_secs(20);
        let mut child = ChildProcess::test("process::tests::child_main", "echo", &[]).unwrap();
        child.expect_line("ready", second).unwrap();
        child.say("one").unwrap();
        assert_eq!(child.expect_line("heard", second).unwrap(), "heard one");
        child.stop().unwrap();
        child.say("two").unwrap();
        let silent = child.expect_line("heard", Duration::from_millis(50)).unwrap_err();
        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
        child.resume().unwrap();
        assert_eq!(child.expect_line("heard", second).unwrap(), "heard two");
        child.kill();
        assert!(!child.wait(second).unwrap().success());
    }
}

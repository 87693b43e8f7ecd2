//! `kvxfer-bench demo`: hand-overs between real processes, and what happens when something goes wrong.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use kvxfer::EndpointAddress;
use kvxfer_core::{Error, ErrorKind, Result};

use crate::cli::DemoArgs;
use crate::control::Child;
use crate::node::{Ended, Midway, Request, Setup, Started};
use crate::rng::SplitMix64;
use crate::terminal::{self, BOLD, DIM, GREEN, RED, bytes, duration, rate};
use crate::work::TOKENS_PER_BLOCK;

/// How long any single step may take on a loaded machine.
const STEP_MAX: Duration = Duration::from_secs(30);
/// A dead peer is reported within this time.
const DEATH_REPORT_MAX: Duration = Duration::from_secs(3);
/// Attempts at catching a hand-off in mid-air.
const ABORT_TRIES: u32 = 8;

/// What is handed over.
struct Shape {
    title: &'static str,
    model: &'static str,
    tokens: u32,
    chunk: u32,
    layers_per_part: u16,
}

const LLAMA_70B: Shape = Shape {
    title: "Llama-3.1-70B",
    model: r#"
[[model]]
name = "llama-3.1-70b"
dtype = "bf16"
[[model.group]]
name = "attention"
kind = "attention"
layers = [{ first = 0, end = 80 }]
kv_heads = 8
head_size = 128
"#,
    tokens: 2048,
    chunk: 512,
    layers_per_part: 1,
};

const SMALL: Shape = Shape {
    title: "a model of 16 layers",
    model: r#"
[[model]]
name = "small"
dtype = "bf16"
[[model.group]]
name = "attention"
kind = "attention"
layers = [{ first = 0, end = 16 }]
kv_heads = 8
head_size = 128
"#,
    tokens: 1024,
    chunk: 256,
    layers_per_part: 4,
};

/// Runs all scenes; says whether everything was as promised.
pub(crate) fn run(arguments: &DemoArgs) -> Result<bool> {
    let begun = Instant::now();
    let shape = if arguments.small { &SMALL } else { &LLAMA_70B };
    let mut demo = Demo::start(shape)?;
    demo.streamed(false)?;
    demo.streamed(true)?;
    demo.two_ranks()?;
    demo.abort_and_reuse()?;
    demo.corruption()?;
    demo.death_and_recovery()?;
    let failures = demo.account.failures;
    drop(demo);
    terminal::line("");
    if failures == 0 {
        terminal::line(&format!(
            "{} everything was as promised, in {}",
            terminal::paint(GREEN, "ok"),
            duration(begun.elapsed())
        ));
    } else {
        let text = format!("FAILED: {failures} of the checks above");
        terminal::line(&terminal::paint(RED, &text));
    }
    Ok(failures == 0)
}

/// What is told, and what went wrong so far.
struct Account {
    scenes: u32,
    failures: u32,
}

impl Account {
    fn scene(&mut self, title: &str) {
        self.scenes += 1;
        terminal::line("");
        terminal::line(&terminal::paint(BOLD, &format!("{}. {title}", self.scenes)));
    }

    fn tell(&self, text: &str) {
        terminal::line(&format!("   {}", terminal::paint(DIM, text)));
    }

    fn check(&mut self, fine: bool, text: &str) {
        let mark = if fine {
            terminal::paint(GREEN, "ok")
        } else {
            self.failures += 1;
            terminal::paint(RED, "FAILED")
        };
        terminal::line(&format!("   {mark} {text}"));
    }
}

/// A process of the demonstration.
struct Worker {
    child: Child,
    started: Started,
    name: String,
}

impl Worker {
    fn start(shape: &Shape, name: &str, listen: SocketAddr, tensor: (u16, u16), blocks: u32) -> Result<Worker> {
        let mut child = Child::start(name, &["peer", "node"])?;
        let setup = Setup {
            name: name.into(),
            listen,
            model: shape.model.into(),
            tensor,
            blocks,
        };
        let started: Started = child.ask(&Request::Start(setup), STEP_MAX)?;
        Ok(Worker {
            child,
            started,
            name: name.into(),
        })
    }

    fn ask<T: serde::de::DeserializeOwned>(&mut self, request: Request) -> Result<T> {
        self.child.ask(&request, STEP_MAX)
    }

    fn describe(&self) -> String {
        let address = &self.started.address;
        let socket = address.sockets.first().map_or("?".into(), SocketAddr::to_string);
        format!(
            "{:<10} pid {:<8} {socket:<18} {}",
            self.name,
            self.child.pid(),
            identity(address)
        )
    }
}

struct Demo {
    shape: &'static Shape,
    account: Account,
    prefill: Worker,
    decode: Worker,
    blocks: u32,
    random: SplitMix64,
}

fn anywhere() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
}

impl Demo {
    fn start(shape: &'static Shape) -> Result<Demo> {
        let blocks = shape.tokens / TOKENS_PER_BLOCK;
        let prefill = Worker::start(shape, "prefill-0", anywhere(), (0, 4), 2 * blocks)?;
        let decode = Worker::start(shape, "decode-0", anywhere(), (0, 4), 2 * blocks)?;
        let demo = Demo {
            shape,
            account: Account { scenes: 0, failures: 0 },
            prefill,
            decode,
            blocks,
            random: SplitMix64::new(1),
        };
        let Started {
            planes, block_bytes, ..
        } = demo.decode.started;
        terminal::line(&terminal::paint(
            BOLD,
            &format!(
                "kvxfer: {} at TP4, {} tokens: {blocks} blocks x {planes} planes of {} = {} per request",
                shape.title,
                shape.tokens,
                bytes(block_bytes),
                bytes(demo.request_bytes())
            ),
        ));
        demo.account.tell(&demo.prefill.describe());
        demo.account.tell(&demo.decode.describe());
        Ok(demo)
    }

    fn request_bytes(&self) -> u64 {
        u64::from(self.decode.started.planes) * u64::from(self.blocks) * self.decode.started.block_bytes
    }

    fn scattered(&mut self) -> Vec<u32> {
        self.random.permutation(2 * self.blocks, self.blocks)
    }

    /// One hand-over, from nothing to checked bytes.
    fn hand_over(&mut self, key: &str, pull: bool) -> Result<()> {
        let (source, destination) = (self.scattered(), self.scattered());
        self.decode.ask::<()>(Request::Poison {
            blocks: destination.clone(),
        })?;
        // The claim comes first: decode knows of the request before prefill has computed anything.
        self.decode.ask::<()>(Request::Claim {
            key: key.into(),
            sources: vec![self.prefill.started.address.clone()],
            blocks: destination.clone(),
            pull,
        })?;
        self.prefill.ask::<()>(Request::Offer {
            key: key.into(),
            blocks: source,
            corrupt: None,
        })?;
        self.decode.child.send(&Request::Arrived {
            key: key.into(),
            timeout_ms: 20_000,
        })?;
        let begun: u64 = self.prefill.ask(self.stream(key, None))?;
        let arrived: Ended = self.decode.child.answered(STEP_MAX)?;
        self.tell_arrival(key, begun, &arrived);
        self.expect_release(key)?;
        self.expect_bytes(key, destination)
    }

    fn stream(&self, key: &str, chunks: Option<u32>) -> Request {
        Request::Stream {
            key: key.into(),
            chunk: self.shape.chunk,
            layers: self.shape.layers_per_part,
            chunks,
        }
    }

    fn tell_arrival(&mut self, key: &str, begun: u64, arrived: &Ended) {
        let took = Duration::from_nanos(arrived.nanos.saturating_sub(begun));
        let want = self.request_bytes();
        match &arrived.result {
            Ok(got) => self.account.check(
                *got == want,
                &format!(
                    "{key}: {} in {} blocks arrived {} after the first part was released, {}",
                    bytes(*got),
                    self.blocks * self.decode.started.planes,
                    duration(took),
                    rate(*got, took)
                ),
            ),
            Err(error) => self.account.check(false, &format!("{key} did not arrive: {error}")),
        }
    }

    fn expect_release(&mut self, key: &str) -> Result<()> {
        let released: Ended = self.prefill.ask(Request::Released {
            key: key.into(),
            timeout_ms: 5_000,
        })?;
        match released.result {
            Ok(members) => self.account.check(
                members == 1,
                "prefill was told that it arrived: its blocks may be reused",
            ),
            Err(error) => self
                .account
                .check(false, &format!("prefill was told otherwise: {error}")),
        }
        Ok(())
    }

    fn expect_bytes(&mut self, key: &str, blocks: Vec<u32>) -> Result<()> {
        let want = self.request_bytes();
        match self.decode.ask::<u64>(Request::Verify {
            key: key.into(),
            blocks,
        }) {
            Ok(checked) => self
                .account
                .check(checked == want, &format!("all {checked} bytes are right")),
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                self.account.check(false, &format!("wrong bytes: {error}"));
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn streamed(&mut self, pull: bool) -> Result<()> {
        let parts = self.shape.tokens / self.shape.chunk * u32::from(self.layers() / self.shape.layers_per_part);
        let title = if pull {
            "The same, pulled: decode asks for each part and has it validated"
        } else {
            "A hand-over, pushed while prefill computes: chunk by chunk, layer by layer"
        };
        self.account.scene(title);
        self.account.tell(&format!(
            "{} tokens per chunk, {} of {} layers per part: {parts} parts",
            self.shape.chunk,
            self.shape.layers_per_part,
            self.layers()
        ));
        self.hand_over(if pull { "r-2" } else { "r-1" }, pull)?;
        if !pull {
            let address = self.decode.started.address.clone();
            let explained: String = self.prefill.ask(Request::Explain { address })?;
            for line in terminal::path_of(&explained) {
                self.account.tell(line);
            }
        }
        Ok(())
    }

    fn layers(&self) -> u16 {
        (self.decode.started.planes / 2) as u16
    }

    fn two_ranks(&mut self) -> Result<()> {
        self.account
            .scene("Two prefill ranks (TP8) to one decode rank (TP4): half of the heads from each");
        let key = "r-3";
        let mut ranks = Vec::new();
        for rank in 0..2 {
            let name = format!("prefill-{}", rank + 1);
            ranks.push(Worker::start(self.shape, &name, anywhere(), (rank, 8), self.blocks)?);
        }
        for rank in &ranks {
            let text = format!("{}  blocks of {}", rank.describe(), bytes(rank.started.block_bytes));
            self.account.tell(&text);
        }
        let destination = self.scattered();
        self.decode.ask::<()>(Request::Poison {
            blocks: destination.clone(),
        })?;
        self.decode.ask::<()>(Request::Claim {
            key: key.into(),
            sources: ranks.iter().map(|rank| rank.started.address.clone()).collect(),
            blocks: destination.clone(),
            pull: false,
        })?;
        for rank in &mut ranks {
            let blocks = self.random.permutation(self.blocks, self.blocks);
            rank.ask::<()>(Request::Offer {
                key: key.into(),
                blocks,
                corrupt: None,
            })?;
        }
        self.decode.child.send(&Request::Arrived {
            key: key.into(),
            timeout_ms: 20_000,
        })?;
        for rank in &mut ranks {
            rank.child.send(&self.stream(key, None))?;
        }
        let mut begun = u64::MAX;
        for rank in &mut ranks {
            begun = begun.min(rank.child.answered(STEP_MAX)?);
        }
        let arrived: Ended = self.decode.child.answered(STEP_MAX)?;
        self.tell_arrival(key, begun, &arrived);
        for rank in &mut ranks {
            let released: Ended = rank.ask(Request::Released {
                key: key.into(),
                timeout_ms: 5_000,
            })?;
            let text = match &released.result {
                Ok(_) => format!("{} was told that it arrived", rank.name),
                Err(error) => format!("{} was told otherwise: {error}", rank.name),
            };
            self.account.check(released.result == Ok(1), &text);
        }
        self.expect_bytes(key, destination)
    }

    fn abort_and_reuse(&mut self) -> Result<()> {
        self.account.scene("Abort in mid-air, and reuse the blocks at once");
        let destination = self.scattered();
        let mut caught = None;
        for attempt in 0..ABORT_TRIES {
            let key = format!("r-4.{attempt}");
            let midway = self.abort(&key, destination.clone())?;
            // A claim that arrived before the cancel has arrived: try to be faster.
            if midway.ended.result.is_err() {
                caught = Some((key, midway));
                break;
            }
            self.prefill
                .ask::<Ended>(Request::Released { key, timeout_ms: 5_000 })?;
        }
        let Some((key, midway)) = caught else {
            self.account.check(
                false,
                "the hand-off could not be caught in mid-air: it was too fast each time",
            );
            return Ok(());
        };
        let kind = midway.ended.result.as_ref().err().map(Error::kind);
        self.account.check(
            kind == Some(ErrorKind::Cancelled) && midway.untouched > 0 && midway.untouched < midway.pieces,
            &format!(
                "{key} was cancelled with {} of {} blocks outstanding; its end was reported {} later{}",
                midway.untouched,
                midway.pieces,
                duration(Duration::from_secs_f64(midway.cancel_seconds)),
                kind.map_or(String::new(), |kind| format!(" ({kind})"))
            ),
        );
        // The next request takes the very same blocks, without a pause.
        let reuse = "r-5";
        self.prefill_offer(reuse)?;
        self.decode.ask::<()>(Request::Claim {
            key: reuse.into(),
            sources: vec![self.prefill.started.address.clone()],
            blocks: destination.clone(),
            pull: false,
        })?;
        self.decode.child.send(&Request::Arrived {
            key: reuse.into(),
            timeout_ms: 20_000,
        })?;
        let begun: u64 = self.prefill.ask(self.stream(reuse, None))?;
        let arrived: Ended = self.decode.child.answered(STEP_MAX)?;
        self.tell_arrival(reuse, begun, &arrived);
        self.expect_bytes(reuse, destination.clone())?;
        let released: Ended = self.prefill.ask(Request::Released {
            key: key.clone(),
            timeout_ms: 5_000,
        })?;
        let text = match &released.result {
            Err(error) => format!("prefill was told of {key}: {}", error.kind()),
            Ok(_) => format!("prefill was told that {key} arrived, which it did not"),
        };
        self.account.check(released.result.is_err(), &text);
        std::thread::sleep(Duration::from_millis(300));
        self.account
            .tell("300 ms later, in case something of the cancelled request lands late:");
        self.expect_bytes(reuse, destination)?;
        self.expect_release(reuse)
    }

    /// Cancels at the first bytes.
    fn abort(&mut self, key: &str, blocks: Vec<u32>) -> Result<Midway> {
        self.decode.ask::<()>(Request::Poison { blocks: blocks.clone() })?;
        self.prefill_offer(key)?;
        self.decode.ask::<()>(Request::Claim {
            key: key.into(),
            sources: vec![self.prefill.started.address.clone()],
            blocks,
            pull: false,
        })?;
        self.decode.child.send(&Request::CancelMidway { key: key.into() })?;
        // Everything at once, so that bytes are in flight when the cancel comes.
        let streamed = self.prefill.ask::<u64>(Request::Stream {
            key: key.into(),
            chunk: self.shape.tokens,
            layers: u16::MAX,
            chunks: None,
        });
        let midway = self.decode.child.answered(STEP_MAX)?;
        // The cancel may reach the offer between two calls of prefill's; that is no failure.
        match streamed {
            Err(error) if error.kind() == ErrorKind::PeerLost => Err(error),
            _ => Ok(midway),
        }
    }

    fn prefill_offer(&mut self, key: &str) -> Result<()> {
        let blocks = self.scattered();
        self.prefill.ask(Request::Offer {
            key: key.into(),
            blocks,
            corrupt: None,
        })
    }

    fn corruption(&mut self) -> Result<()> {
        self.account
            .scene("One flipped bit in one block: the check must catch it");
        let key = "r-6";
        let (source, destination) = (self.scattered(), self.scattered());
        let victim = self.blocks as usize / 3;
        self.decode.ask::<()>(Request::Poison {
            blocks: destination.clone(),
        })?;
        self.prefill.ask::<()>(Request::Offer {
            key: key.into(),
            corrupt: Some(source[victim]),
            blocks: source,
        })?;
        self.decode.ask::<()>(Request::Claim {
            key: key.into(),
            sources: vec![self.prefill.started.address.clone()],
            blocks: destination.clone(),
            pull: false,
        })?;
        self.decode.child.send(&Request::Arrived {
            key: key.into(),
            timeout_ms: 20_000,
        })?;
        let begun: u64 = self.prefill.ask(self.stream(key, None))?;
        let arrived: Ended = self.decode.child.answered(STEP_MAX)?;
        self.tell_arrival(key, begun, &arrived);
        let checked = self.decode.ask::<u64>(Request::Verify {
            key: key.into(),
            blocks: destination,
        });
        match checked {
            Ok(_) => self.account.check(false, "the check did not see the flipped bit"),
            Err(error) => {
                // Byte 100 of a block is in its first token.
                let token = format!("token {} ", victim as u32 * TOKENS_PER_BLOCK);
                self.account.check(
                    error.kind() == ErrorKind::Corrupt && error.what().contains(&token),
                    &format!("caught: {error}"),
                );
            }
        }
        self.expect_release(key)
    }

    fn death_and_recovery(&mut self) -> Result<()> {
        self.account.scene("Kill the decode process in mid-air, and recover");
        let key = "r-7";
        let destination = self.scattered();
        self.decode.ask::<()>(Request::Poison {
            blocks: destination.clone(),
        })?;
        self.prefill_offer(key)?;
        self.decode.ask::<()>(Request::Claim {
            key: key.into(),
            sources: vec![self.prefill.started.address.clone()],
            blocks: destination,
            pull: false,
        })?;
        // Half of the request is released: the hand-off cannot have ended when the process dies.
        let half = self.shape.tokens / self.shape.chunk / 2;
        self.decode.child.send(&Request::FirstBytes { key: key.into() })?;
        self.prefill.ask::<u64>(self.stream(key, Some(half)))?;
        let moving: bool = self.decode.child.answered(STEP_MAX)?;
        self.account.check(moving, "bytes of r-7 are landing");
        let old = self.decode.started.address.clone();
        let died = Instant::now();
        let status = self.decode.child.kill()?;
        self.account.tell(&format!(
            "killed {} (pid {}): {status}",
            self.decode.name,
            self.decode.child.pid()
        ));
        let released: Ended = self.prefill.ask(Request::Released {
            key: key.into(),
            timeout_ms: 10_000,
        })?;
        let reported = died.elapsed();
        match &released.result {
            Ok(_) => self
                .account
                .check(false, "prefill was told that r-7 arrived at a dead process"),
            Err(error) => self.account.check(
                reported <= DEATH_REPORT_MAX && matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Unknown),
                &format!("prefill was told {} after the death: {error}", duration(reported)),
            ),
        }
        let listen = old.sockets.first().copied().unwrap_or_else(anywhere);
        self.decode = Worker::start(self.shape, "decode-0", listen, (0, 4), 2 * self.blocks)?;
        self.account.tell(&format!(
            "restarted under the same name and port: {}",
            self.decode.describe()
        ));
        self.account.check(
            self.decode.started.address.incarnation != old.incarnation,
            &format!(
                "its incarnation is new: {} was {}",
                identity(&self.decode.started.address),
                identity(&old)
            ),
        );
        let stale = self.prefill.ask::<()>(Request::Connect {
            address: old,
            timeout_ms: 5_000,
        });
        match stale {
            Ok(()) => self.account.check(false, "the old address still connects"),
            Err(error) => self.account.check(
                error.kind() == ErrorKind::StalePeer,
                &format!("the old address is refused: {error}"),
            ),
        }
        self.hand_over("r-8", false)
    }
}

fn identity(address: &EndpointAddress) -> String {
    address
        .incarnation
        .map_or("?".into(), |incarnation| format!("{:.8}…", incarnation.to_string()))
}

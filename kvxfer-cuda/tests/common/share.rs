//! Memory that endpoints on one host map of each other, in this process and in others.

use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

use kvxfer_core::memory::{CopyState, Exported, ImportState, Imported, ImportedRun, Region, Segment};
use kvxfer_core::{Error, Result};
use kvxfer_cuda::{Cuda, Gather};
use kvxfer_fake_cuda::FakeCuda;
use kvxfer_testkit::process::{ChildProcess, role};

use super::{PATIENCE, config, pattern, region, segment, until, wait};

pub(crate) fn export(region: &Arc<Region>) -> Result<Arc<dyn Exported>> {
    region.domain().export(region).unwrap()
}

/// Waits until it is decided.
pub(crate) fn decided(import: &Arc<dyn Imported>) -> ImportState {
    until("the import is decided", || {
        !matches!(import.state(), ImportState::Pending)
    });
    import.state()
}

pub(crate) fn ready(import: &Arc<dyn Imported>) {
    let state = decided(import);
    assert!(matches!(state, ImportState::Ready), "{state:?}");
}

/// Waits until it is gone; why.
pub(crate) fn gone(import: &Arc<dyn Imported>) -> Error {
    until("the import is gone", || matches!(import.state(), ImportState::Gone(_)));
    match import.state() {
        ImportState::Gone(error) => error,
        state => panic!("{state:?}"),
    }
}

pub(crate) fn run(region: &Arc<dyn Imported>, offset: u64, length: u64) -> ImportedRun<'_> {
    ImportedRun { region, offset, length }
}

/// Copies runs of imports, in order and densely, into segments of a region, and waits for it.
pub(crate) fn copy(into: &Arc<Region>, runs: &[ImportedRun<'_>], segments: &[Segment]) -> Result<()> {
    let domain = into.domain();
    let ticket = domain.start_import_copy(runs, std::slice::from_ref(into), segments)?;
    wait(&**domain, ticket)
}

/// Imports what is described into the region's domain, and copies all of it into the region.
pub(crate) fn take_all(into: &Arc<Region>, description: &[u8]) -> Result<Arc<dyn Imported>> {
    let import = into.domain().import(description).unwrap();
    if let ImportState::Gone(error) = decided(&import) {
        return Err(error);
    }
    assert_eq!(import.length(), into.length());
    let all = segment(0, 0, into.length());
    copy(into, &[run(&import, 0, into.length())], &[all])?;
    Ok(import)
}

pub(crate) fn bytes_of(fake: &FakeCuda, region: &Region) -> Vec<u8> {
    fake.read(region.address(), region.length() as usize).unwrap()
}

pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}

/// What is at the other end of the tests below: a process that exports and imports as it is told.
pub(crate) fn child_main() {
    match role().as_deref() {
        Some("importer") => importer(),
        Some("owner") => owner(),
        _ => {}
    }
}

fn attach(directory: &str) -> FakeCuda {
    FakeCuda::attach(Path::new(directory)).unwrap()
}

#[allow(clippy::print_stdout)]
fn importer() {
    let fake = attach(&std::env::var("FAKE").unwrap());
    let device: u32 = std::env::var("DEVICE").unwrap().parse().unwrap();
    let engine = fake.engine(device).unwrap();
    let cuda = Cuda::load(&config(&fake, Gather::Auto)).unwrap();
    let (mut imports, mut regions) = (Vec::new(), Vec::new());
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let (word, rest) = match line.starts_with("no ") {
            true => (&*line, ""),
            false => line.split_once(' ').unwrap_or((&line, "")),
        };
        match word {
            "import" => {
                let (length, description) = rest.split_once(' ').unwrap();
                let length: u64 = length.parse().unwrap();
                let into = region(&cuda, engine.allocate(length as usize).unwrap(), length).unwrap();
                match take_all(&into, &unhex(description)) {
                    Ok(import) => {
                        println!("said copied {}", checksum(&bytes_of(&fake, &into)));
                        imports.push(import);
                    }
                    Err(error) => println!("said refused {error}"),
                }
                regions.push(into);
            }
            // A copy whose end nobody waits for.
            "begin" => {
                let (length, description) = rest.split_once(' ').unwrap();
                let length: u64 = length.parse().unwrap();
                let into = region(&cuda, engine.allocate(length as usize).unwrap(), length).unwrap();
                let import = into.domain().import(&unhex(description)).unwrap();
                ready(&import);
                let runs = [run(&import, 0, length)];
                let all = [segment(0, 0, length)];
                let domain = into.domain();
                let ticket = domain
                    .start_import_copy(&runs, std::slice::from_ref(&into), &all)
                    .unwrap();
                (0..10).for_each(|_| assert_eq!(domain.poll_copy(ticket).unwrap(), CopyState::Running));
                println!("said begun");
                imports.push(import);
                regions.push(into);
            }
            // An import for the device of what was begun.
            "map" => {
                let import = regions.last().unwrap().domain().import(&unhex(rest)).unwrap();
                println!("said {:?}", decided(&import));
            }
            "no more descriptors" => {
                let none = rustix::process::Rlimit {
                    // Those that are open are more; but nobody may poll more than so many.
                    current: Some(8),
                    ..rustix::process::getrlimit(rustix::process::Resource::Nofile)
                };
                rustix::process::setrlimit(rustix::process::Resource::Nofile, none).unwrap();
                println!("said none");
            }
            "drop" => {
                imports.clear();
                println!("said dropped");
            }
            "fork" => println!("said {}", fork()),
            "count" => println!("said {}", fake.count(rest)),
            "end" => break,
            _ => panic!("{line}"),
        }
    }
    drop((imports, regions, cuda));
    println!("said {:?}", fake.leaks());
}

/// A process that has everything of this one, and does nothing; its number.
fn fork() -> i32 {
    // SAFETY: the child only sleeps, and ends without running anything of ours.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: as above.
            unsafe { libc::sleep(120) };
            // SAFETY: as above.
            unsafe { libc::_exit(0) }
        }
        process => process,
    }
}

/// Exports one region of each driver that it is told of.
#[allow(clippy::print_stdout)]
fn owner() {
    let mut kept = Vec::new();
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["export", directory, device, length] => {
                let fake = attach(directory);
                let engine = fake.engine(device.parse().unwrap()).unwrap();
                let length: usize = length.parse().unwrap();
                let cuda = Cuda::load(&config(&fake, Gather::Auto)).unwrap();
                let made = region(&cuda, engine.allocate(length).unwrap(), length as u64).unwrap();
                fake.write(made.address(), &pattern(length, 9)).unwrap();
                let exported = export(&made).unwrap();
                println!("said {}", hex(exported.description()));
                kept.push((exported, made, cuda, engine, fake));
            }
            ["fork"] => println!("said {}", fork()),
            ["drop", directory] => {
                kept.retain(|(.., fake): &(_, _, _, _, FakeCuda)| fake.directory() != Path::new(directory));
                println!("said dropped");
            }
            _ => panic!("{line}"),
        }
    }
    // Nobody listens to what the test harness says at its end.
    drop(kept);
    std::process::exit(0);
}

pub(crate) struct Child(pub(crate) ChildProcess);

impl Child {
    pub(crate) fn importer(fake: &FakeCuda, device: &str) -> Child {
        let directory = fake.directory().to_str().unwrap();
        Child::start("importer", &[("FAKE", directory), ("DEVICE", device)])
    }

    pub(crate) fn owner() -> Child {
        Child::start("owner", &[])
    }

    fn start(role: &str, variables: &[(&str, &str)]) -> Child {
        let mut child = ChildProcess::test("child_main", role, variables).unwrap();
        child.expect_line("ready", PATIENCE).unwrap();
        Child(child)
    }

    pub(crate) fn ask(&mut self, what: &str) -> String {
        self.0.say(what).unwrap();
        self.answer()
    }

    pub(crate) fn answer(&mut self) -> String {
        let line = self.0.expect_line("said ", PATIENCE).unwrap();
        line["said ".len()..].to_owned()
    }

    /// Has it map what is exported, for the device of what it has begun to copy.
    pub(crate) fn maps(&mut self, exported: &Arc<dyn Exported>) -> String {
        self.ask(&format!("map {}", hex(exported.description())))
    }

    /// Has it begin to copy what is exported.
    pub(crate) fn begins(&mut self, exported: &Arc<dyn Exported>, length: u64) {
        let begun = self.ask(&format!("begin {length} {}", hex(exported.description())));
        assert_eq!(begun, "begun");
    }

    /// Has it fork, and kills it: only the fork is left.
    pub(crate) fn kill_all_but_a_fork(&mut self) -> Fork {
        let fork = Fork(self.ask("fork").parse().unwrap());
        self.0.kill();
        fork
    }

    /// Has it import all of an export.
    pub(crate) fn imports(&mut self, exported: &Arc<dyn Exported>, length: u64) -> String {
        self.ask(&format!("import {length} {}", hex(exported.description())))
    }

    /// Has it export a region that has the pattern 9; its description.
    pub(crate) fn exports(&mut self, fake: &FakeCuda, device: u32, length: u64) -> Vec<u8> {
        let directory = fake.directory().to_str().unwrap();
        unhex(&self.ask(&format!("export {directory} {device} {length}")))
    }
}

/// A process that is killed when this is dropped.
pub(crate) struct Fork(i32);

impl Drop for Fork {
    fn drop(&mut self) {
        // SAFETY: takes two numbers.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
    }
}

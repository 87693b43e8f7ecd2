//! What is there while something is in use, and that nothing is afterwards. Alone in its process: it counts threads.

#![allow(clippy::unwrap_used)]

mod common;

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::share::{export, take_all};
use common::{Bench, Staging, until};
use kvxfer_cuda::Gather;

/// Threads of ours, by name.
fn threads() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .filter(|name| name.starts_with("kvx-"))
        .collect();
    names.sort();
    names
}

/// Processor time of the process.
fn processor_time() -> Duration {
    let mut spent = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one structure.
    let asked = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut spent) };
    assert_eq!(asked, 0);
    Duration::new(spent.tv_sec as u64, spent.tv_nsec as u32)
}

#[test]
fn threads_start_with_their_work_and_end_with_their_owner() {
    let bench = Bench::with(&[], Gather::Auto);
    let made = bench.region(1 << 20);
    assert_eq!(threads(), [] as [String; 0], "nothing is copied or watched yet");
    made.copy_in(0, &[1; 100]).unwrap();
    assert_eq!(threads(), ["kvx-copy-0"]);
    let event = bench.engine.event().unwrap();
    // SAFETY: a live event.
    let captured = unsafe { bench.cuda.capture(event as *mut c_void) }.unwrap();
    let told = Arc::new(AtomicBool::new(false));
    let tell = told.clone();
    bench
        .cuda
        .watch(captured, Box::new(move |_| tell.store(true, Ordering::Release)));
    until("the event is told", || told.load(Ordering::Acquire));
    assert_eq!(threads(), ["kvx-copy-0", "kvx-cuda"]);
    let staging = Staging::pinned(made.domain(), 4096).unwrap();

    // Idle, they call and spend nothing.
    let (calls, spent, begun) = (bench.fake.count("*"), processor_time(), Instant::now());
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(bench.fake.count("*"), calls);
    let spent = processor_time() - spent;
    assert!(spent * 10 < begun.elapsed(), "{spent:?}");

    // The region outlives the driver's last user; with it goes the rest.
    let Bench { cuda, engine, fake } = bench;
    let again = cuda.clone();
    drop(cuda);
    assert_eq!(threads().len(), 2);
    drop(again);
    assert_eq!(threads(), ["kvx-copy-0"]);
    let mut out = [0; 100];
    made.copy_out(0, &mut out).unwrap();
    assert_eq!(out, [1; 100]);
    drop(staging);
    drop(made);
    assert_eq!(threads(), [] as [String; 0]);
    assert_eq!(fake.leaks(), [] as [String; 0]);
    assert_eq!(fake.count("active_gpu0"), 1, "the engine's");
    drop(engine);
    assert_eq!(fake.count("active_gpu0"), 0);
    fake.assert_clean();

    // Sharing has threads of its own, from its first work on.
    let bench = Bench::new();
    let (from, to) = (bench.region(1 << 20), bench.region(1 << 20));
    let exported = export(&from).unwrap();
    // A thread gives itself its name.
    until("the owner's thread", || threads() == ["kvx-share"]);
    let import = take_all(&to, exported.description()).unwrap();
    assert_eq!(threads(), ["kvx-copy-0", "kvx-import", "kvx-share"]);
    let (calls, spent, begun) = (bench.fake.count("*"), processor_time(), Instant::now());
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(bench.fake.count("*"), calls);
    let spent = processor_time() - spent;
    assert!(spent * 10 < begun.elapsed(), "{spent:?}");
    // Neither keeps the domain, and the domain keeps what imports.
    let Bench { cuda, engine, fake } = bench;
    drop((exported, cuda));
    assert_eq!(threads(), ["kvx-copy-0", "kvx-import"]);
    drop((import, from, to));
    assert_eq!(threads(), [] as [String; 0]);
    assert_eq!(fake.leaks(), [] as [String; 0]);
    drop(engine);
    fake.assert_clean();

    // A copy that never ends is not waited for.
    let bench = Bench::with(&[("*", "stall", "own")], Gather::Auto);
    let made = bench.region(1 << 20);
    let domain = made.domain().clone();
    let staging = Staging::pinned(&domain, 4096).unwrap();
    let regions = [made];
    let part = common::segment(0, 0, 4096);
    let ticket = domain.start_gather(&regions, &[part], staging.view()).unwrap();
    until("the copy is handed over", || {
        domain.poll_copy(ticket).unwrap();
        bench.fake.count("cuMemcpyAsync") == 1
    });
    let Bench { cuda, fake, engine } = bench;
    let begun = Instant::now();
    drop((regions, domain, cuda));
    std::mem::forget(staging);
    assert!(begun.elapsed() < common::PATIENCE / 2);
    // Its thread ends when it does.
    fake.set_now("*", "stall", "off").unwrap();
    until("the thread ends", || threads().is_empty());
    drop((engine, fake));
}

//! Devices of several processes: the configuration, throughput, and processes that are killed or stopped.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::io::BufRead;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{ALL_RIGHTS, Device, Options, Pair, Request, keys, load};
use kvxfer_fake_verbs::FakeFabric;
use kvxfer_rdma::sys;
use kvxfer_testkit::process::{ChildProcess, role};

const SIZE: usize = 16 << 20;

/// The receiver: registers memory, connects to the queue pair that it is told, posts receives, and answers questions.
#[test]
#[ignore = "started by the tests below"]
fn child_main() {
    if role().as_deref() == Some("counter") {
        // SAFETY: a library made to be loaded.
        let verbs = unsafe { sys::Libibverbs::new(std::env::var("LIBRARY").unwrap()) }.unwrap();
        let mut count = -1;
        // SAFETY: as the verb's.
        unsafe { verbs.ibv_free_device_list(verbs.ibv_get_device_list(&raw mut count)) };
        println!("devices {count}");
    }
    if role().as_deref() != Some("receiver") {
        return;
    }
    let directory = std::env::var("FABRIC").unwrap();
    let fabric = FakeFabric::attach(Path::new(&directory)).unwrap();
    let device = Device::open(&load(&fabric), "fake1");
    let mut memory = vec![0u8; SIZE];
    let mr = device.register(&mut memory, ALL_RIGHTS);
    let pair = Pair::new(&device, Options::default());
    println!("here {} {} {}", pair.number(), memory.as_ptr() as u64, keys(mr).1);
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        match words[0] {
            "connect" => {
                let gid = FAKE0_GID;
                pair.connect(words[1].parse().unwrap(), gid);
                assert_eq!(pair.post_receives(0, 64), 0);
                println!("connected");
            }
            "immediate" => {
                let wc = device.wait(1);
                println!(
                    "got {} {}",
                    wc[0].status,
                    memory.iter().filter(|byte| **byte == 6).count()
                );
            }
            "port" => println!("port {}", device.port().state),
            _ => break,
        }
    }
}

const FAKE0_GID: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 99, 0, 1];

struct Run {
    fabric: FakeFabric,
    child: ChildProcess,
    device: Device,
    pair: Pair,
    source: Vec<u8>,
    lkey: u32,
    remote: u64,
    rkey: u32,
}

impl Run {
    fn new(options: Options) -> Run {
        let fabric = FakeFabric::new().unwrap();
        let directory = fabric.directory().to_str().unwrap().to_owned();
        let mut child = ChildProcess::test("child_main", "receiver", &[("FABRIC", &directory)]).unwrap();
        let device = Device::open(&load(&fabric), "fake0");
        let mut source = vec![6u8; SIZE];
        let mr = device.register(&mut source, ALL_RIGHTS);
        let pair = Pair::new(&device, options);
        let line = child.expect_line("here", Duration::from_secs(20)).unwrap();
        let words: Vec<u64> = line.split(' ').skip(1).map(|word| word.parse().unwrap()).collect();
        let mut gid = FAKE0_GID;
        gid[15] = 2;
        pair.connect(words[0] as u32, gid);
        child.say(&format!("connect {}", pair.number())).unwrap();
        child.expect_line("connected", Duration::from_secs(20)).unwrap();
        let lkey = keys(mr).0;
        Run {
            fabric,
            child,
            device,
            pair,
            source,
            lkey,
            remote: words[1],
            rkey: words[2] as u32,
        }
    }

    fn write(&self, id: u64, length: usize) -> Request {
        Request::write(id, &self.source[..length], self.lkey, self.remote, self.rkey)
    }
}

#[test]
fn a_write_reaches_another_process_fast_enough() {
    let mut run = Run::new(Options::default());
    run.pair
        .post(&[run.write(1, SIZE).unsignalled(), Request::immediate(2, 9)]);
    run.child.say("immediate").unwrap();
    assert_eq!(
        run.child.expect_line("got", Duration::from_secs(20)).unwrap(),
        format!("got 0 {SIZE}")
    );
    run.device.wait(1);
    let mut best = 0.0f64;
    for _ in 0..10 {
        let start = Instant::now();
        let batch: Vec<Request> = (0..64).map(|id| run.write(id, 1 << 20)).collect();
        run.pair.post(&batch);
        run.device.wait(64);
        best = best.max(f64::from(64 << 20) / start.elapsed().as_secs_f64() / 1e6);
    }
    println!("1 MiB writes between two processes: {best:.0} MB/s");
    // A tenth of what a machine with nothing else to do reaches.
    assert!(best > 200.0, "{best:.0} MB/s");
    let start = Instant::now();
    let mut count = 0;
    while start.elapsed() < Duration::from_millis(300) {
        let batch: Vec<Request> = (0..64)
            .map(|id| Request {
                unsignalled: id % 16 != 15,
                ..run.write(id, 8192)
            })
            .collect();
        run.pair.post(&batch);
        run.device.wait(4);
        count += 64;
    }
    println!(
        "8 KiB writes: {:.0} MB/s",
        f64::from(count) * 8192.0 / start.elapsed().as_secs_f64() / 1e6
    );
}

#[test]
fn a_library_that_lies_elsewhere_finds_its_fabric_in_the_environment() {
    let fabric = FakeFabric::with(&[("*", "devices", "3")]).unwrap();
    let elsewhere = fabric.directory().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let library = elsewhere.join("libibverbs.so.1");
    std::fs::copy(fabric.library_path(), &library).unwrap();
    let library = library.to_str().unwrap();
    let directory = fabric.directory().to_str().unwrap();
    for (fabric, expected) in [(directory, "devices 3"), ("", "devices 0")] {
        let variables = [("LIBRARY", library), ("KVXFER_FAKE_VERBS", fabric)];
        let mut child = ChildProcess::test("child_main", "counter", &variables).unwrap();
        assert_eq!(child.expect_line("devices", Duration::from_secs(20)).unwrap(), expected);
    }
}

#[test]
fn the_configuration_reaches_all_processes() {
    let mut run = Run::new(Options::default());
    run.fabric.set_everywhere("*", "port_state", "down").unwrap();
    assert_eq!(run.device.event(), Some(sys::IBV_EVENT_PORT_ERR));
    run.child.say("port").unwrap();
    let line = run.child.expect_line("port", Duration::from_secs(5)).unwrap();
    assert_eq!(line, format!("port {}", sys::IBV_PORT_DOWN));
    run.child.stop().unwrap();
    let late = run.fabric.set_everywhere("*", "port_state", "active").unwrap_err();
    assert_eq!(late.kind(), std::io::ErrorKind::TimedOut);
    run.child.kill();
    run.fabric.set_everywhere("*", "port_state", "down").unwrap();
}

#[test]
fn a_killed_process_is_silent() {
    let mut run = Run::new(Options {
        retries: 1,
        timeout: 8,
        ..Options::default()
    });
    run.pair.post(&[run.write(1, 1000)]);
    assert_eq!(run.device.wait(1)[0].status, sys::IBV_WC_SUCCESS);
    run.child.kill();
    run.pair.post(&[run.write(2, 1000)]);
    assert_eq!(run.device.wait(1)[0].status, sys::IBV_WC_RETRY_EXC_ERR);
}

#[test]
fn a_stopped_process_is_silent_until_it_goes_on() {
    let mut run = Run::new(Options {
        retries: 7,
        timeout: 18,
        ..Options::default()
    });
    run.child.stop().unwrap();
    run.pair.post(&[run.write(1, SIZE), Request::immediate(2, 1)]);
    std::thread::sleep(Duration::from_millis(300));
    assert!(run.device.poll().is_empty());
    run.child.resume().unwrap();
    let done = run.device.wait(2);
    assert!(done.iter().all(|wc| wc.status == sys::IBV_WC_SUCCESS));
    run.child.say("immediate").unwrap();
    assert_eq!(
        run.child.expect_line("got", Duration::from_secs(20)).unwrap(),
        format!("got 0 {SIZE}")
    );
}

#[test]
fn an_idle_device_costs_nothing() {
    let fabric = FakeFabric::new().unwrap();
    let _device = Device::open(&load(&fabric), "fake0");
    std::thread::sleep(Duration::from_millis(50));
    let before = fabric.counter("fake0", "wakeups");
    std::thread::sleep(Duration::from_millis(500));
    // Once; or 50 times a second where the system has no watches left to tell of a changed configuration.
    assert!(fabric.counter("fake0", "wakeups") - before <= 30);
}

//! Random work under loss, delay and reordering: every byte arrives, and completions come in order.

#![allow(clippy::unwrap_used)]

mod common;

use std::time::{Duration, Instant};

use common::{ALL_RIGHTS, Device, Options, Pair, Request, keys, load};
use kvxfer_fake_verbs::FakeFabric;
use kvxfer_rdma::sys;

/// A small generator, so that a failure can be repeated with its seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

const PAIRS: usize = 3;
const REQUESTS: usize = 40;
const LONGEST: usize = 200_000;

#[test]
fn random_work_under_loss_delay_and_reordering() {
    for seed in 0..12 {
        run(seed);
    }
}

fn run(seed: u64) {
    let mut random = Random(seed * 7919 + 1);
    let drop_percent = (random.below(4) * 8).to_string();
    let latency = (random.below(3) * 300).to_string();
    let late = (random.below(2) * 5000).to_string();
    let order = if random.below(2) == 0 { "in" } else { "shuffled" };
    let fabric = FakeFabric::with(&[
        ("*", "drop_percent", &drop_percent),
        ("*", "latency_us", &latency),
        ("*", "late_placement_us", &late),
        ("*", "order", order),
        ("*", "min_timeout_us", "3000"),
        ("*", "retry_exceeded", "off"),
    ])
    .unwrap();
    let verbs = load(&fabric);
    let (a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
    let options = Options {
        timeout: 6,
        depth: 1 + random.below(4) as u8,
        psn: random.below(1 << 24) as u32,
        ..Options::default()
    };
    let pairs: Vec<_> = (0..PAIRS).map(|_| Pair::connected(&a, &b, options)).collect();
    let room = PAIRS * REQUESTS * LONGEST;
    let mut source: Vec<u8> = (0..room).map(|place| (place * 31 % 251) as u8 + 1).collect();
    let mut target = vec![0u8; room];
    let mut back = vec![0u8; room];
    let (from, home) = (a.register(&mut source, ALL_RIGHTS), a.register(&mut back, ALL_RIGHTS));
    let to = b.register(&mut target, ALL_RIGHTS);
    let mut expected = vec![Vec::new(); PAIRS];
    let mut immediates = 0;
    let mut written = Vec::new();
    for (index, (left, right)) in pairs.iter().enumerate() {
        assert_eq!(right.post_receives(0, REQUESTS as u64), 0);
        let mut requests = Vec::new();
        for id in 0..REQUESTS {
            let place = (index * REQUESTS + id) * LONGEST;
            let length = random.below(LONGEST as u64) as usize;
            let remote = target.as_ptr() as u64 + place as u64;
            let write = Request::write(
                id as u64,
                &source[place..place + length],
                keys(from).0,
                remote,
                keys(to).1,
            );
            let request = match random.below(4) {
                0 => {
                    immediates += 1;
                    Request {
                        opcode: sys::IBV_WR_RDMA_WRITE_WITH_IMM,
                        immediate: id as u32,
                        ..write
                    }
                }
                // Reads what a request before it has written on the same queue pair.
                1 if id > 0 && written.last().is_some_and(|(pair, _, _, _)| *pair == index) => {
                    let (_, place, length, read): &mut (usize, usize, usize, bool) = written.last_mut().unwrap();
                    *read = true;
                    let remote = target.as_ptr() as u64 + *place as u64;
                    let into = &mut back[*place..*place + *length];
                    Request::read(id as u64, into, keys(home).0, remote, keys(to).1)
                }
                _ => write,
            };
            if request.opcode != sys::IBV_WR_RDMA_READ {
                written.push((index, place, length, false));
            }
            let signalled = random.below(3) == 0 || id + 1 == REQUESTS;
            if signalled {
                expected[index].push(id as u64);
            }
            requests.push(Request {
                unsignalled: !signalled,
                fence: random.below(5) == 0,
                ..request
            });
        }
        left.post(&requests);
    }
    let total: usize = expected.iter().map(Vec::len).sum();
    let mut got = vec![Vec::new(); PAIRS];
    let limit = Instant::now() + Duration::from_secs(30);
    while got.iter().map(Vec::len).sum::<usize>() < total {
        for wc in a.poll() {
            assert_eq!(wc.status, sys::IBV_WC_SUCCESS, "seed {seed}");
            let index = pairs.iter().position(|(left, _)| left.number() == wc.qp_num).unwrap();
            got[index].push(wc.wr_id);
        }
        assert!(Instant::now() < limit, "seed {seed}: {got:?} instead of {expected:?}");
        std::thread::sleep(Duration::from_micros(200));
    }
    assert_eq!(got, expected, "seed {seed}");
    assert_eq!(b.wait(immediates).len(), immediates);
    b.deregister(to);
    for (left, right) in pairs {
        left.destroy();
        right.destroy();
    }
    a.deregister(from);
    a.deregister(home);
    a.close();
    b.close();
    assert_eq!(fabric.counter("*", "misuse"), 0);
    for (_, place, length, read) in written {
        let range = place..place + length;
        assert!(
            target[range.clone()] == source[range.clone()],
            "seed {seed}: written at {place}"
        );
        assert!(
            !read || back[range.clone()] == source[range],
            "seed {seed}: read at {place}"
        );
    }
}

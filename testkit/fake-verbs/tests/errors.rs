//! What goes wrong on a connection, and how it is told.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use common::{ALL_RIGHTS, Device, Options, Pair, Request, eventually, keys, load, peek};
use kvxfer_fake_verbs::FakeFabric;
use kvxfer_rdma::sys;

/// Two devices, a region on each, and what connects them.
struct Set {
    fabric: FakeFabric,
    a: Device,
    b: Device,
    source: Vec<u8>,
    target: Vec<u8>,
    from: *mut sys::ibv_mr,
    to: *mut sys::ibv_mr,
}

impl Set {
    fn new(settings: &[(&str, &str, &str)]) -> Set {
        let fabric = FakeFabric::with(settings).unwrap();
        let verbs = load(&fabric);
        let (a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
        let mut source = vec![1u8; 100_000];
        let mut target = vec![0u8; 100_000];
        let from = a.register(&mut source, ALL_RIGHTS);
        let to = b.register(&mut target, ALL_RIGHTS);
        Set {
            fabric,
            a,
            b,
            source,
            target,
            from,
            to,
        }
    }

    fn lkey(&self) -> u32 {
        keys(self.from).0
    }

    fn rkey(&self) -> u32 {
        keys(self.to).1
    }

    /// A write of `length` bytes to the start of the target.
    fn write(&self, id: u64, length: usize) -> Request {
        Request::write(
            id,
            &self.source[..length],
            self.lkey(),
            self.target.as_ptr() as u64,
            self.rkey(),
        )
    }
}

fn statuses(completions: &[sys::ibv_wc]) -> Vec<(u64, u32)> {
    completions.iter().map(|wc| (wc.wr_id, wc.status)).collect()
}

#[test]
fn a_wrong_remote_key_bound_or_right_is_an_access_error_and_flushes_the_rest() {
    let set = Set::new(&[]);
    let mut unwritable = vec![0u8; 4096];
    let read_only = set.b.register(&mut unwritable, sys::IBV_ACCESS_REMOTE_READ);
    let mut good = set.write(2, 1000);
    good.remote += 99_500;
    let beyond = good.clone();
    let mut with_local_key = set.write(2, 1000);
    with_local_key.key = keys(set.to).0;
    let right = Request {
        remote: unwritable.as_ptr() as u64,
        key: keys(read_only).1,
        ..set.write(2, 100)
    };
    let before = Request {
        remote: set.target.as_ptr() as u64 - 1,
        ..set.write(2, 100)
    };
    for wrong in [beyond, with_local_key, right, before] {
        let (left, other) = Pair::connected(&set.a, &set.b, Options::default());
        assert_eq!(other.post_receives(7, 2), 0);
        left.post(&[
            set.write(1, 1000),
            wrong,
            set.write(3, 10).unsignalled(),
            set.write(4, 10),
        ]);
        let sent = set.a.wait(4);
        let flushed = sys::IBV_WC_WR_FLUSH_ERR;
        assert_eq!(
            statuses(&sent),
            [
                (1, sys::IBV_WC_SUCCESS),
                (2, sys::IBV_WC_REM_ACCESS_ERR),
                (3, flushed),
                (4, flushed)
            ]
        );
        assert!(sent[1].opcode > 255, "the opcode of a failed completion means nothing");
        assert_eq!(statuses(&set.b.wait(2)), [(7, flushed), (8, flushed)]);
        assert_eq!(set.b.event(), Some(sys::IBV_EVENT_QP_ACCESS_ERR));
        left.destroy();
        other.destroy();
    }
    assert_eq!(set.fabric.counter("fake1", "access_errors"), 4);
}

#[test]
fn a_key_is_stale_after_deregistering_and_of_no_use_in_another_domain() {
    let set = Set::new(&[]);
    let mut old = vec![0u8; 4096];
    let mr = set.b.register(&mut old, ALL_RIGHTS);
    let stale = keys(mr).1;
    set.b.deregister(mr);
    let mr = set.b.register(&mut old, ALL_RIGHTS);
    assert_ne!(keys(mr).1, stale);
    let elsewhere = Device::open(&load(&set.fabric), "fake1");
    let foreign = elsewhere.register(&mut old, ALL_RIGHTS);
    for key in [stale, keys(foreign).1 ^ 0x0100] {
        let (left, _right) = Pair::connected(&set.a, &set.b, Options::default());
        left.post(&[Request {
            key,
            remote: old.as_ptr() as u64,
            ..set.write(1, 100)
        }]);
        assert_eq!(set.a.wait(1)[0].status, sys::IBV_WC_REM_ACCESS_ERR);
    }
}

#[test]
fn a_wrong_local_key_fails_after_what_came_before_it() {
    let set = Set::new(&[]);
    let (left, _right) = Pair::connected(&set.a, &set.b, Options::default());
    let mut wrong = set.write(2, 1000);
    wrong.pieces[0].2 = set.lkey() ^ 1;
    left.post(&[set.write(1, 50_000).unsignalled(), wrong, set.write(3, 10)]);
    let sent = set.a.wait(2);
    assert_eq!(
        statuses(&sent),
        [(2, sys::IBV_WC_LOC_PROT_ERR), (3, sys::IBV_WC_WR_FLUSH_ERR)]
    );
    assert_eq!(peek(&set.target, 49_999), 1);
}

#[test]
fn without_a_receive_an_immediate_waits_or_fails_by_rnr_retry() {
    let set = Set::new(&[]);
    let (left, right) = Pair::connected(&set.a, &set.b, Options::default());
    left.post(&[Request::immediate(1, 5)]);
    eventually("told that it is not ready", || {
        set.fabric.counter("fake1", "rnr_naks") > 9
    });
    assert!(set.a.poll().is_empty());
    assert_eq!(right.post_receives(3, 1), 0);
    assert_eq!(set.b.wait(1)[0].wr_id, 3);
    assert_eq!(set.a.wait(1)[0].status, sys::IBV_WC_SUCCESS);
    let options = Options {
        not_ready_retries: 3,
        ..Options::default()
    };
    let (left, _right) = Pair::connected(&set.a, &set.b, options);
    let before = set.fabric.counter("fake1", "rnr_naks");
    left.post(&[
        set.write(1, 70_000),
        Request {
            id: 2,
            opcode: sys::IBV_WR_RDMA_WRITE_WITH_IMM,
            ..set.write(2, 70_000)
        },
    ]);
    let expected = [(1, sys::IBV_WC_SUCCESS), (2, sys::IBV_WC_RNR_RETRY_EXC_ERR)];
    assert_eq!(statuses(&set.a.wait(2)), expected);
    assert_eq!(set.fabric.counter("fake1", "rnr_naks") - before, 4);
}

#[test]
fn err_flushes_everything_in_order_and_what_is_posted_afterwards() {
    let set = Set::new(&[("fake1", "network_hold", "on")]);
    let (left, right) = Pair::connected(&set.a, &set.b, Options::default());
    assert_eq!(left.post_receives(50, 2), 0);
    left.post(&[
        set.write(1, 90_000).unsignalled(),
        set.write(2, 10),
        Request::immediate(3, 1),
    ]);
    eventually("in the network", || {
        set.fabric.counter("fake1", "packets_received") == 4
    });
    assert_eq!(left.to(sys::IBV_QPS_ERR), 0);
    let all = set.a.wait(5);
    assert!(all.iter().all(|wc| wc.status == sys::IBV_WC_WR_FLUSH_ERR));
    let sends: Vec<u64> = all.iter().map(|wc| wc.wr_id).filter(|id| *id < 50).collect();
    assert_eq!(sends, [1, 2, 3]);
    left.post(&[set.write(4, 10).unsignalled()]);
    assert_eq!(left.post_receives(60, 1), 0);
    assert_eq!(
        statuses(&set.a.wait(2))
            .iter()
            .map(|(_, status)| *status)
            .collect::<Vec<_>>(),
        [sys::IBV_WC_WR_FLUSH_ERR; 2]
    );
    // Packets that are still in the network when the responder leaves RTS are dropped.
    assert_eq!(right.to(sys::IBV_QPS_ERR), 0);
    set.fabric.set_now("fake1", "network_hold", "off").unwrap();
    eventually("dropped", || set.fabric.counter("fake1", "packets_dropped") == 4);
    assert_eq!(set.target, vec![0; 100_000]);
}

#[test]
fn reset_loses_completions_and_a_reused_number_takes_old_packets() {
    let set = Set::new(&[("fake1", "network_hold", "on")]);
    let options = Options {
        timeout: 20,
        ..Options::default()
    };
    let (left, right) = Pair::connected(&set.a, &set.b, options);
    left.post(&[set.write(1, 1000)]);
    eventually("in the network", || {
        set.fabric.counter("fake1", "packets_received") == 1
    });
    assert_eq!(left.to(sys::IBV_QPS_RESET), 0);
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(set.a.poll().is_empty(), "RESET gives no completions");
    assert_eq!(set.fabric.counter("fake0", "resets_with_outstanding"), 1);
    // The responder is reset too and used again with the same sequence numbers: the old packet still fits.
    assert_eq!(right.to(sys::IBV_QPS_RESET), 0);
    right.connect(left.number(), set.a.gid(1));
    set.fabric.set_now("fake1", "network_hold", "off").unwrap();
    eventually("the old write lands", || peek(&set.target, 999) == 1);
    // Completions that wait to be polled are lost as well.
    let (left, _right) = Pair::connected(&set.a, &set.b, options);
    left.post(&[set.write(1, 1000)]);
    eventually("written", || set.fabric.counter("fake1", "bytes_written") == 2000);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(left.to(sys::IBV_QPS_RESET), 0);
    assert_eq!(set.fabric.counter("fake0", "completions_lost"), 1);
    assert!(set.a.poll().is_empty());
}

#[test]
fn a_silent_peer_is_reported_after_the_retries_or_never() {
    let set = Set::new(&[]);
    let options = Options {
        retries: 1,
        timeout: 8,
        ..Options::default()
    };
    let (left, right) = Pair::connected(&set.a, &set.b, options);
    right.destroy();
    left.post(&[set.write(1, 10), set.write(2, 10)]);
    let expected = [(1, sys::IBV_WC_RETRY_EXC_ERR), (2, sys::IBV_WC_WR_FLUSH_ERR)];
    assert_eq!(statuses(&set.a.wait(2)), expected);
    set.fabric.set_now("fake0", "retry_exceeded", "off").unwrap();
    let (left, right) = Pair::connected(&set.a, &set.b, options);
    assert_eq!(right.to(sys::IBV_QPS_ERR), 0);
    left.post(&[set.write(3, 10)]);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(set.a.poll().is_empty());
    assert_eq!(left.to(sys::IBV_QPS_ERR), 0);
    assert_eq!(statuses(&set.a.wait(1)), [(3, sys::IBV_WC_WR_FLUSH_ERR)]);
}

#[test]
fn completions_can_be_wrong_before_or_after_the_bytes_have_moved() {
    let set = Set::new(&[]);
    let (left, _right) = Pair::connected(&set.a, &set.b, Options::default());
    set.fabric.set_now("fake0", "complete_with", "REM_OP_ERR:1").unwrap();
    left.post(&[set.write(1, 10), set.write(2, 10)]);
    let flushed = sys::IBV_WC_WR_FLUSH_ERR;
    assert_eq!(statuses(&set.a.wait(2)), [(1, sys::IBV_WC_REM_OP_ERR), (2, flushed)]);
    assert_eq!(peek(&set.target, 9), 0);
    set.fabric
        .set_now("fake0", "complete_with", "RETRY_EXC_ERR:1:after")
        .unwrap();
    let (left, _right) = Pair::connected(&set.a, &set.b, Options::default());
    left.post(&[set.write(3, 10)]);
    assert_eq!(statuses(&set.a.wait(1)), [(3, sys::IBV_WC_RETRY_EXC_ERR)]);
    assert_eq!(peek(&set.target, 9), 1);
}

#[test]
fn ends_with_different_path_mtus_understand_only_short_messages() {
    let set = Set::new(&[]);
    let (left, right) = (
        Pair::new(&set.a, Options::default()),
        Pair::new(&set.b, Options::default()),
    );
    left.connect(right.number(), set.b.gid(1));
    assert_eq!(right.init(), 0);
    let small = Options {
        mtu: sys::IBV_MTU_256,
        ..Options::default()
    };
    let right = Pair {
        options: small,
        ..right
    };
    assert_eq!(right.ready_to_receive(left.number(), set.a.gid(1)), 0);
    left.post(&[set.write(1, 256), set.write(2, 257)]);
    let expected = [(1, sys::IBV_WC_SUCCESS), (2, sys::IBV_WC_REM_INV_REQ_ERR)];
    assert_eq!(statuses(&set.a.wait(2)), expected);
}

#[test]
fn more_reads_than_agreed_are_an_invalid_request() {
    let set = Set::new(&[("fake1", "bandwidth_bytes_per_s", "20000000")]);
    let greedy = Pair::new(
        &set.a,
        Options {
            depth: 4,
            ..Options::default()
        },
    );
    let modest = Pair::new(
        &set.b,
        Options {
            depth: 1,
            ..Options::default()
        },
    );
    greedy.connect(modest.number(), set.b.gid(1));
    modest.connect(greedy.number(), set.a.gid(1));
    let mut back = vec![0u8; 100_000];
    let home = set.a.register(&mut back, ALL_RIGHTS);
    let key = keys(home).0;
    let reads: Vec<_> = (0..4)
        .map(|id| Request::read(id, &mut back, key, set.target.as_ptr() as u64, set.rkey()))
        .collect();
    greedy.post(&reads);
    let all = statuses(&set.a.wait(4));
    assert!(
        all.iter().any(|(_, status)| *status == sys::IBV_WC_REM_INV_REQ_ERR),
        "{all:?}"
    );
}

//! Reliable connections as they are meant to be.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use common::{ALL_RIGHTS, Device, Options, Pair, Request, eventually, keys, load, peek};
use kvxfer_fake_verbs::FakeFabric;
use kvxfer_rdma::sys;

#[test]
fn a_write_an_immediate_and_a_read_between_two_devices() {
    let fabric = FakeFabric::new().unwrap();
    let verbs = load(&fabric);
    let (a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
    let (left, right) = Pair::connected(&a, &b, Options::default());
    let mut source: Vec<u8> = (0..3_000_000u32).map(|byte| (byte % 251) as u8).collect();
    let mut target = vec![0u8; 3_000_000];
    let mut back = vec![0u8; 3_000_000];
    let from = a.register(&mut source, ALL_RIGHTS);
    let to = b.register(&mut target, ALL_RIGHTS);
    let home = a.register(&mut back, ALL_RIGHTS);
    let (lkey, rkey, home_key) = (keys(from).0, keys(to).1, keys(home).0);
    assert_eq!(right.post_receives(100, 2), 0);
    let mut write = Request::write(1, &source, lkey, target.as_ptr() as u64, rkey).unsignalled();
    // In pieces, of which one is empty.
    let base = source.as_ptr() as u64;
    write.pieces = vec![(base, 1_000_001, lkey), (0, 0, 0), (base + 1_000_001, 1_999_999, lkey)];
    left.post(&[write, Request::immediate(2, 0xabcd_1234)]);
    let sent = a.wait(1);
    assert_eq!(
        (sent[0].wr_id, sent[0].status, sent[0].opcode),
        (2, sys::IBV_WC_SUCCESS, sys::IBV_WC_RDMA_WRITE)
    );
    let received = b.wait(1);
    assert_eq!(
        (received[0].wr_id, received[0].opcode),
        (100, sys::IBV_WC_RECV_RDMA_WITH_IMM)
    );
    // SAFETY: with an immediate.
    let immediate = unsafe { u32::from_be(received[0].__bindgen_anon_1.imm_data) };
    assert_eq!(immediate, 0xabcd_1234);
    assert_eq!(received[0].wc_flags & sys::IBV_WC_WITH_IMM, sys::IBV_WC_WITH_IMM);
    assert_eq!(source, target);
    left.post(&[Request::read(3, &mut back, home_key, target.as_ptr() as u64, rkey)]);
    let read = a.wait(1);
    assert_eq!(
        (read[0].wr_id, read[0].status, read[0].opcode),
        (3, sys::IBV_WC_SUCCESS, sys::IBV_WC_RDMA_READ)
    );
    assert_eq!(source, back);
    assert_eq!(fabric.counter("fake1", "bytes_written"), 3_000_000);
    assert_eq!(fabric.counter("fake0", "doorbells"), 2);
    left.destroy();
    right.destroy();
    a.deregister(from);
    a.deregister(home);
    b.deregister(to);
    a.close();
    b.close();
    assert_eq!(fabric.counter("*", "misuse"), 0);
}

#[test]
fn many_writes_and_reads_mixed_under_loss_and_shuffling_arrive_intact() {
    let fabric = FakeFabric::with(&[
        ("*", "drop_percent", "3"),
        ("*", "order", "shuffled"),
        ("*", "min_timeout_us", "5000"),
    ])
    .unwrap();
    let verbs = load(&fabric);
    let (a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
    let options = Options {
        retries: 7,
        timeout: 8,
        ..Options::default()
    };
    let pairs: Vec<_> = (0..4).map(|_| Pair::connected(&a, &b, options)).collect();
    const SIZE: usize = 150_000;
    const COUNT: usize = 12;
    let total = SIZE * COUNT * pairs.len();
    let mut source: Vec<u8> = (0..total).map(|byte| (byte * 7 % 253) as u8).collect();
    let mut target = vec![0u8; total];
    let mut back = vec![0u8; total];
    let from = a.register(&mut source, ALL_RIGHTS);
    let to = b.register(&mut target, ALL_RIGHTS);
    let home = a.register(&mut back, ALL_RIGHTS);
    let (lkey, rkey, home_key) = (keys(from).0, keys(to).1, keys(home).0);
    for (index, (left, right)) in pairs.iter().enumerate() {
        assert_eq!(right.post_receives(0, COUNT as u64), 0);
        let mut requests = Vec::new();
        for piece in 0..COUNT {
            let place = (index * COUNT + piece) * SIZE;
            let remote = target.as_ptr() as u64 + place as u64;
            requests.push(Request::write(1, &source[place..place + SIZE], lkey, remote, rkey).unsignalled());
            requests.push(Request::immediate(2, place as u32));
            requests.push(Request::read(3, &mut back[place..place + SIZE], home_key, remote, rkey));
        }
        left.post(&requests);
    }
    let done = a.wait(pairs.len() * COUNT * 2);
    assert!(done.iter().all(|wc| wc.status == sys::IBV_WC_SUCCESS));
    b.wait(pairs.len() * COUNT);
    assert_eq!(source, back);
    assert_eq!(source, target);
    assert!(fabric.counter("*", "packets_lost") > 0);
    assert!(fabric.counter("fake0", "retransmissions") > 0);
}

#[test]
fn a_connection_of_a_device_to_itself() {
    let fabric = FakeFabric::new().unwrap();
    let verbs = load(&fabric);
    let a = Device::open(&verbs, "fake0");
    let own = Pair::new(&a, Options::default());
    own.connect(own.number(), a.gid(1));
    let mut memory = vec![7u8; 200_000];
    let mr = a.register(&mut memory, ALL_RIGHTS);
    let (lkey, rkey) = keys(mr);
    let half = memory.as_ptr() as u64 + 100_000;
    memory[100_000..].fill(9);
    let request = Request {
        pieces: vec![(memory.as_ptr() as u64, 100_000, lkey)],
        ..Request::read(5, &mut [], lkey, half, rkey)
    };
    own.post(&[request]);
    assert_eq!(a.wait(1)[0].status, sys::IBV_WC_SUCCESS);
    eventually("read", || peek(&memory, 99_999) == 9);
}

//! Bytes that were accepted and acknowledged, and are not in memory yet.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::time::Duration;

use common::{ALL_RIGHTS, Device, Options, Pair, Request, eventually, keys, load, peek};
use kvxfer_fake_verbs::FakeFabric;
use kvxfer_rdma::sys;

const SIZE: usize = 100_000;

/// A write that was acknowledged and not placed, and the pair it came through.
fn late_write(fabric: &FakeFabric, target: &mut [u8]) -> (Device, Device, Pair, Pair, u32) {
    let verbs = load(fabric);
    let (a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
    let (left, right) = Pair::connected(&a, &b, Options::default());
    let source = Box::leak(vec![3u8; SIZE].into_boxed_slice());
    let from = a.register(source, ALL_RIGHTS);
    let to = b.register(target, ALL_RIGHTS);
    let (lkey, rkey) = (keys(from).0, keys(to).1);
    left.post(&[Request::write(1, source, lkey, target.as_ptr() as u64, rkey)]);
    assert_eq!(a.wait(1)[0].status, sys::IBV_WC_SUCCESS);
    assert_eq!(peek(target, 0), 0, "acknowledged, not placed");
    (a, b, left, right, rkey)
}

#[test]
fn they_land_after_err_and_destroy_when_their_time_has_come() {
    let fabric = FakeFabric::with(&[("fake1", "late_placement_us", "500000")]).unwrap();
    let mut target = vec![0u8; SIZE];
    let (_a, b, left, right, _) = late_write(&fabric, &mut target);
    assert_eq!(right.to(sys::IBV_QPS_ERR), 0);
    right.destroy();
    left.destroy();
    assert!(b.poll().is_empty());
    assert_eq!(peek(&target, SIZE - 1), 0, "destroying flushes nothing");
    eventually("placed", || peek(&target, SIZE - 1) == 3);
    assert_eq!(fabric.counter("fake1", "late_bytes_placed_after_error"), SIZE as u64);
    assert_eq!(fabric.counter("fake1", "writes_after_destroy"), 2, "two packets");
}

#[test]
fn a_loopback_read_on_the_device_forces_them_in() {
    let fabric = FakeFabric::with(&[("fake1", "late_placement_us", "60000000")]).unwrap();
    let mut target = vec![0u8; SIZE];
    let (_a, b, _left, right, rkey) = late_write(&fabric, &mut target);
    assert_eq!(right.to(sys::IBV_QPS_ERR), 0);
    right.destroy();
    let own = Pair::new(&b, Options::default());
    own.connect(own.number(), b.gid(1));
    let mut scrap = vec![0u8; 8];
    let home = b.register(&mut scrap, ALL_RIGHTS);
    let key = keys(home).0;
    own.post(&[Request::read(9, &mut scrap, key, target.as_ptr() as u64, rkey)]);
    assert_eq!(b.wait(1)[0].status, sys::IBV_WC_SUCCESS);
    assert_eq!(target, vec![3; SIZE]);
    assert_eq!(fabric.counter("fake1", "late_bytes_flushed"), SIZE as u64);
}

#[test]
fn with_flush_scope_region_a_read_of_another_region_is_not_enough() {
    let fabric = FakeFabric::with(&[
        ("fake1", "late_placement_us", "60000000"),
        ("fake1", "flush_scope", "region"),
    ])
    .unwrap();
    let mut target = vec![0u8; SIZE];
    let (_a, b, _left, _right, rkey) = late_write(&fabric, &mut target);
    let own = Pair::new(&b, Options::default());
    own.connect(own.number(), b.gid(1));
    let mut scrap = vec![0u8; 8];
    let home = b.register(&mut scrap, ALL_RIGHTS);
    let (lkey, other_rkey) = keys(home);
    let scrap_address = scrap.as_ptr() as u64;
    own.post(&[Request::read(9, &mut scrap, lkey, scrap_address, other_rkey)]);
    assert_eq!(b.wait(1)[0].status, sys::IBV_WC_SUCCESS);
    assert_eq!(peek(&target, 0), 0);
    own.post(&[Request::read(9, &mut scrap, lkey, target.as_ptr() as u64, rkey)]);
    assert_eq!(b.wait(1)[0].status, sys::IBV_WC_SUCCESS);
    assert_eq!(peek(&target, 0), 3);
}

#[test]
fn the_receive_of_a_later_immediate_on_the_same_queue_pair_comes_after_them() {
    let fabric = FakeFabric::with(&[("fake1", "late_placement_us", "60000000")]).unwrap();
    let mut target = vec![0u8; SIZE];
    let (_a, b, left, right, _) = late_write(&fabric, &mut target);
    assert_eq!(right.post_receives(4, 1), 0);
    left.post(&[Request::immediate(2, 77)]);
    assert_eq!(b.wait(1)[0].wr_id, 4);
    assert_eq!(target, vec![3; SIZE]);
}

#[test]
fn deregistering_places_them_first_so_that_nothing_is_written_afterwards() {
    let fabric = FakeFabric::with(&[("fake1", "late_placement_us", "500000")]).unwrap();
    let verbs = load(&fabric);
    let (a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
    let (left, _right) = Pair::connected(&a, &b, Options::default());
    let mut source = vec![3u8; 1000];
    let mut target = vec![0u8; 1000];
    let (from, to) = (a.register(&mut source, ALL_RIGHTS), b.register(&mut target, ALL_RIGHTS));
    let (lkey, rkey) = (keys(from).0, keys(to).1);
    left.post(&[Request::write(1, &source, lkey, target.as_ptr() as u64, rkey)]);
    a.wait(1);
    b.deregister(to);
    assert_eq!(target, vec![3; 1000]);
    target.fill(0);
    std::thread::sleep(Duration::from_millis(700));
    assert_eq!(target, vec![0; 1000]);
    assert_eq!(fabric.counter("fake1", "late_bytes_at_deregister"), 1000);
}

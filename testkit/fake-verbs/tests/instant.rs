//! What the fake itself costs in mode `instant`, to be subtracted from what the software above costs.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::time::Instant;

use common::{Device, Options, Pair, Request, load};
use kvxfer_fake_verbs::FakeFabric;
use kvxfer_rdma::sys;

#[test]
fn the_own_cost_of_a_request_is_small() {
    let fabric = FakeFabric::with(&[("*", "mode", "instant")]).unwrap();
    let device = Device::open(&load(&fabric), "fake0");
    let own = Pair::new(&device, Options::default());
    own.connect(own.number(), device.gid(1));
    let write = |id, unsignalled| Request {
        opcode: sys::IBV_WR_RDMA_WRITE,
        unsignalled,
        ..Request::immediate(id, 0)
    };
    let list: Vec<_> = (0..64).map(|id| write(id, id != 63)).collect();
    let list = common::Posted::new(&list);
    // SAFETY: a live context.
    let poll = unsafe { (*device.context).ops.poll_cq.unwrap() };
    // SAFETY: all zero is a valid one.
    let mut out: sys::ibv_wc = unsafe { std::mem::zeroed() };
    let start = Instant::now();
    const ROUNDS: u32 = 2000;
    for _ in 0..ROUNDS {
        list.post(&own);
        // SAFETY: a live completion queue and room for one.
        assert_eq!(unsafe { poll(device.cq, 1, &raw mut out) }, 1);
    }
    let each = start.elapsed() / (ROUNDS * 64);
    println!("a request posted and completed at once: {each:?}");
    // Two hundred times what it should be on a machine with nothing else to do.
    assert!(each.as_nanos() < 20_000, "{each:?}");
}

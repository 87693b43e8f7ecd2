//! Memory that a caller takes away while it is registered.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvxfer::memory::HostMemory;
use kvxfer::{ClaimOptions, ErrorKind, OfferOptions, PoolLayout, Region, Role, Selection};
use kvxfer_cases::common::*;

/// The caller has broken the contract of `register`. Nothing can be promised; but it is said, and it ends.
#[test]
fn source_memory_that_is_gone_is_named_and_given_up() {
    const BLOCK: u32 = 64 << 10;
    let (prefill, decode) = (endpoint("prefill"), endpoint("decode"));
    let length = 8 * u64::from(BLOCK);
    // SAFETY: a new private mapping.
    let memory = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(memory, libc::MAP_FAILED);
    // SAFETY: broken below on purpose. What is read of it is read by system calls, which refuse it.
    let source = unsafe {
        let region = Region::from_raw(memory.cast(), length, Arc::new(HostMemory), Box::new(())).unwrap();
        prefill
            .register(PoolLayout::opaque(BLOCK, 8).unwrap(), vec![region], Role::Serve)
            .unwrap()
    };
    let destination = decode
        .allocate(PoolLayout::opaque(BLOCK, 8).unwrap(), Role::Receive)
        .unwrap();
    prefill.connect(&decode.address(), LONG).unwrap();
    // SAFETY: the mapping made above, which nothing but the library's system calls touches.
    assert_eq!(unsafe { libc::munmap(memory, length as usize) }, 0);

    let all = Selection::whole_blocks(1, (0..8).collect());
    let offer = prefill.offer("gone", &source, OfferOptions::default()).unwrap();
    offer.append(&all).unwrap();
    offer.finish(8).unwrap();
    let claim = decode
        .claim("gone", &destination, &[prefill.address()], ClaimOptions::default())
        .unwrap();
    claim.fill(all).unwrap();
    let end = Instant::now() + LONG;
    while !prefill.explain(&decode.address()).contains("Bad address") {
        assert!(Instant::now() < end, "{}", prefill.explain(&decode.address()));
        std::thread::sleep(Duration::from_millis(5));
    }
    claim.cancel();
    assert_eq!(claim.arrived().wait(LONG).unwrap_err().kind(), ErrorKind::Cancelled);
    assert!(offer.released().wait(LONG).is_err());

    // The same endpoints still serve memory that is there.
    let sound = prefill
        .allocate(PoolLayout::opaque(BLOCK, 8).unwrap(), Role::Serve)
        .unwrap();
    let offer = prefill.offer("sound", &sound, OfferOptions::default()).unwrap();
    offer.append(Selection::whole_blocks(1, vec![3])).unwrap();
    offer.finish(1).unwrap();
    let claim = decode
        .claim("sound", &destination, &[prefill.address()], ClaimOptions::default())
        .unwrap();
    claim.fill(Selection::whole_blocks(1, vec![5])).unwrap();
    claim.arrived().wait(LONG).unwrap();
}

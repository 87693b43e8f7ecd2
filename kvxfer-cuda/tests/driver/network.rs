//! Memory for network devices: dmabufs, addresses, and their writes made visible.

use std::os::fd::AsRawFd;

use crate::common::{Bench, pattern, region};
use kvxfer_core::ErrorKind;
use kvxfer_core::memory::DmaBuf;
use kvxfer_cuda::Gather;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// What the bytes behind a dmabuf are, read as a network device does.
fn bytes(dmabuf: &DmaBuf, base_offset: u64) -> Vec<u8> {
    let mut bytes = vec![0; dmabuf.length as usize];
    let at = (base_offset + dmabuf.offset) as i64;
    // SAFETY: the buffer has that length.
    let read = unsafe { libc::pread(dmabuf.fd.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), at) };
    assert_eq!(read as u64, dmabuf.length);
    bytes
}

/// Where a fake dmabuf begins in its file: its position.
fn begins(dmabuf: &DmaBuf) -> u64 {
    // SAFETY: a live descriptor.
    let at = unsafe { libc::lseek(dmabuf.fd.as_raw_fd(), 0, libc::SEEK_CUR) };
    u64::try_from(at).unwrap()
}

#[test]
fn a_region_is_one_dmabuf_rounded_out_to_pages() {
    let bench = Bench::new();
    let memory = bench.engine.allocate(3 << 20).unwrap();
    let model = pattern(3 << 20, 1);
    bench.fake.write(memory, &model).unwrap();
    for (offset, length) in [(0, 3 * MIB), (1, 1), (PAGE - 1, 2), (12_345, MIB), (3 * MIB - 5, 5)] {
        let made = region(&bench.cuda, memory + offset, length).unwrap();
        let dmabufs = made.domain().dmabufs(&made).unwrap().unwrap();
        assert_eq!(dmabufs.len(), 1);
        assert_eq!(dmabufs[0].length, length);
        assert_eq!(dmabufs[0].offset, (memory + offset) % PAGE);
        let expected = &model[offset as usize..][..length as usize];
        assert!(bytes(&dmabufs[0], begins(&dmabufs[0])) == expected, "{offset}+{length}");
        assert_eq!(made.domain().peer_address(&made), Some(memory + offset));
    }
    bench.end();
}

#[test]
fn an_allocation_that_begins_inside_a_page_is_exported_too() {
    let bench = Bench::with(&[("*", "alloc_offset", "512")], Gather::Auto);
    let memory = bench.engine.allocate(10_000).unwrap();
    assert_ne!(memory % PAGE, 0);
    let model = pattern(10_000, 2);
    bench.fake.write(memory, &model).unwrap();
    let made = region(&bench.cuda, memory, 10_000).unwrap();
    let dmabufs = made.domain().dmabufs(&made).unwrap().unwrap();
    assert_eq!(dmabufs[0].offset, 512);
    assert!(bytes(&dmabufs[0], begins(&dmabufs[0])) == model);
    drop(made);
    bench.end();
}

#[test]
fn every_mapping_is_a_dmabuf_of_its_own() {
    let bench = Bench::new();
    let lengths = [2 << 20, 4 << 20, 2 << 20];
    let memory = bench.engine.map(&lengths, true).unwrap();
    let model = pattern(8 << 20, 3);
    bench.fake.write(memory, &model).unwrap();
    let made = region(&bench.cuda, memory + 100, 8 * MIB - 300).unwrap();
    let dmabufs = made.domain().dmabufs(&made).unwrap().unwrap();
    let lengths_found: Vec<u64> = dmabufs.iter().map(|dmabuf| dmabuf.length).collect();
    assert_eq!(lengths_found, [2 * MIB - 100, 4 * MIB, 2 * MIB - 200]);
    let all: Vec<u8> = dmabufs
        .iter()
        .flat_map(|dmabuf| bytes(dmabuf, begins(dmabuf)))
        .collect();
    assert!(all == model[100..8 * MIB as usize - 200]);
    assert_eq!(
        made.domain().peer_address(&made),
        None,
        "several mappings have no one address for a driver"
    );
    drop(made);
    bench.engine.unmap(memory, &lengths).unwrap();
    bench.end();
}

#[test]
fn memory_without_gpudirect_is_staged_only_and_says_why() {
    let bench = Bench::new();
    let lengths = [2 << 20, 2 << 20];
    let memory = bench.engine.map(&lengths, false).unwrap();
    let made = region(&bench.cuda, memory, 4 * MIB).unwrap();
    let error = made.domain().dmabufs(&made).unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("gpuDirectRDMACapable"), "{error}");
    assert_eq!(made.domain().peer_address(&made), None);
    made.copy_in(0, &[1; 1000]).unwrap();
    drop(made);
    bench.engine.unmap(memory, &lengths).unwrap();
    bench.end();
}

#[test]
fn a_device_that_cannot_says_why() {
    for (key, value, reason, peer) in [
        ("gpudirect", "off", "no GPUDirect RDMA", false),
        ("dmabuf", "off", "cannot export dmabufs", true),
        ("attributes", "118:0,117:0", "must be flushed", false),
    ] {
        let bench = Bench::with(&[("gpu0", key, value)], Gather::Auto);
        let made = bench.region(4096);
        let error = made.domain().dmabufs(&made).unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains(reason), "{error}");
        assert_eq!(made.domain().peer_address(&made).is_some(), peer, "{key}");
        drop(made);
        bench.end();
    }
}

#[test]
fn the_flag_for_pcie_is_left_out_where_it_is_refused() {
    let bench = Bench::with(&[("*", "driver_version", "12040")], Gather::Auto);
    let made = bench.region(4096);
    assert_eq!(made.domain().dmabufs(&made).unwrap().unwrap().len(), 1);
    assert_eq!(bench.fake.count("cuMemGetHandleForAddressRange"), 2);
    drop(made);
    bench.end();
}

#[test]
fn writes_are_flushed_only_where_the_device_needs_it() {
    for (ordering, flushes) in [("none", 1), ("owner", 0), ("all", 0)] {
        let bench = Bench::with(&[("gpu0", "writes_ordering", ordering)], Gather::Auto);
        let made = bench.region(4096);
        let before = bench.fake.count("*");
        made.domain().settle_writes(&made).unwrap();
        assert_eq!(bench.fake.count("cuFlushGPUDirectRDMAWrites"), flushes, "{ordering}");
        if flushes == 0 {
            assert_eq!(bench.fake.count("*"), before, "{ordering}");
        }
        drop(made);
        bench.end();
    }
}

#[test]
fn a_flush_makes_a_network_devices_write_visible() {
    let bench = Bench::with(&[("gpu0", "writes_ordering", "none")], Gather::Auto);
    let made = bench.region(8192);
    let dmabuf = &made.domain().dmabufs(&made).unwrap().unwrap()[0];
    let at = (begins(dmabuf) + dmabuf.offset) as i64;
    // SAFETY: a buffer of that length.
    let written = unsafe { libc::pwrite(dmabuf.fd.as_raw_fd(), [9u8; 64].as_ptr().cast(), 64, at) };
    assert_eq!(written, 64);
    assert_eq!(bench.fake.read(made.address(), 64).unwrap(), [0; 64]);
    made.domain().settle_writes(&made).unwrap();
    assert_eq!(bench.fake.read(made.address(), 64).unwrap(), [9; 64]);
    drop(made);
    bench.end();
}

#[test]
fn a_flush_that_fails_is_an_error() {
    let bench = Bench::with(
        &[
            ("gpu0", "writes_ordering", "none"),
            ("*", "fail", "cuFlushGPUDirectRDMAWrites:UNKNOWN"),
        ],
        Gather::Auto,
    );
    let made = bench.region(4096);
    let error = made.domain().settle_writes(&made).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Transport, "{error}");
    drop(made);
    bench.end();
}

#[test]
fn small_things_of_the_allocation_are_asked_for_once() {
    let bench = Bench::with(&[("gpu0", "sync_memops", "off")], Gather::Auto);
    let made = bench.region(4096);
    assert_eq!(bench.fake.count("cuPointerSetAttribute"), 1);
    drop(made);
    bench.end();
}

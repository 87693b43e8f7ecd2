//! What addresses are, what becomes a region, and what is refused with which reason.

use crate::common::{self, Bench, config, region};
use kvxfer_core::ErrorKind;
use kvxfer_core::memory::Region;
use kvxfer_cuda::{Availability, Cuda, Gather, PointerKind, WriteOrdering, probe};
use kvxfer_fake_cuda::FakeCuda;

const MIB: u64 = 1 << 20;

#[test]
fn the_probe_says_what_there_is_and_makes_nothing() {
    let fake = FakeCuda::with(&[
        ("gpu1", "dmabuf", "off"),
        ("gpu1", "writes_ordering", "none"),
        ("gpu1", "compute", "7.5"),
    ])
    .unwrap();
    let found = probe(&config(&fake, Gather::Auto));
    let [first, second] = found.devices() else {
        panic!("{found:?}");
    };
    assert_eq!((first.pci.as_str(), first.capability), ("0000:17:00.0", (9, 0)));
    assert_eq!(first.dmabuf_refusal(), None);
    assert_eq!(second.write_ordering, WriteOrdering::None);
    assert!(second.dmabuf_refusal().unwrap().contains("dmabuf"));
    let text = found.to_string();
    assert!(
        text.contains("0000:17:00.0") && text.contains("flushed at arrival"),
        "{text}"
    );
    assert_eq!(fake.count("contexts_created"), 0);
}

#[test]
fn a_driver_that_cannot_be_used_says_why() {
    let fake = FakeCuda::with(&[("*", "driver_version", "11030")]).unwrap();
    let old = probe(&config(&fake, Gather::Auto));
    assert!(matches!(old, Availability::TooOld { have: 11_030, .. }), "{old:?}");
    let fake = FakeCuda::with(&[("*", "devices", "0")]).unwrap();
    let none = probe(&config(&fake, Gather::Auto));
    assert!(matches!(none, Availability::NoDevice), "{none:?}");
    let error = Cuda::load(&config(&fake, Gather::Auto)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let fake = FakeCuda::new().unwrap();
    let mut lacking = config(&fake, Gather::Auto);
    lacking.library = fake
        .library_without(&["cuEventQuery"])
        .unwrap()
        .to_str()
        .unwrap()
        .to_owned();
    let found = probe(&lacking);
    let Availability::MissingSymbol { symbol, .. } = &found else {
        panic!("{found:?}");
    };
    assert_eq!(*symbol, "cuEventQuery");
    fake.set_now("*", "fail", "cuDeviceGetCount:UNKNOWN").unwrap();
    let failed = probe(&config(&fake, Gather::Auto));
    assert!(
        matches!(
            failed,
            Availability::Failed {
                call: "cuDeviceGetCount",
                ..
            }
        ),
        "{failed:?}"
    );
    assert_eq!(failed.refusal().unwrap().kind(), ErrorKind::Transport);
}

#[test]
fn every_kind_of_memory_is_known() {
    let bench = Bench::new();
    let host = vec![0u8; 4096];
    let kind = |address| bench.cuda.classify(address).unwrap();
    assert_eq!(kind(host.as_ptr() as u64).kind, PointerKind::Host);
    assert_eq!(kind(0).kind, PointerKind::Host);
    let pinned = bench.engine.allocate_host(4096).unwrap();
    assert_eq!(kind(pinned).kind, PointerKind::PinnedHost);
    let managed = bench.engine.allocate_managed(4096).unwrap();
    assert_eq!(kind(managed).kind, PointerKind::Managed);
    let device = bench.engine.allocate(3 << 20).unwrap();
    let found = kind(device + 12_345);
    let expected = PointerKind::Device {
        ordinal: 0,
        pci: "0000:17:00.0".into(),
    };
    assert_eq!(found.kind, expected);
    let allocation = found.allocation.unwrap();
    assert_eq!((allocation.base, allocation.length), (device, 3 * MIB));
    assert!(found.buffer_id.is_some() && !found.mappings[0].vmm);
    let lengths = [2 << 20, 4 << 20];
    let mapped = bench.engine.map(&lengths, false).unwrap();
    let found = kind(mapped + 3 * MIB);
    assert!(found.mappings[0].vmm && !found.mappings[0].gpudirect);
    let allocation = found.allocation.unwrap();
    assert_eq!((allocation.base, allocation.length), (mapped + 2 * MIB, 4 * MIB));
    bench.engine.free(device).unwrap();
    assert_eq!(kind(device).kind, PointerKind::Host);
    bench.engine.unmap(mapped, &lengths).unwrap();
    assert_eq!(bench.fake.leaks(), [] as [String; 0]);
    bench.end();
}

#[test]
fn another_devices_memory_is_its_own_and_no_other_device_gets_a_context() {
    let bench = Bench::with(&[("*", "devices", "3")], Gather::Auto);
    let other = bench.fake.engine(1).unwrap();
    let memory = other.allocate(4096).unwrap();
    let made = region(&bench.cuda, memory, 4096).unwrap();
    assert_eq!(made.domain().name(), "cuda:0000:28:00.0");
    made.copy_in(0, &[7; 4096]).unwrap();
    assert_eq!(bench.fake.read(memory, 4096).unwrap(), [7; 4096]);
    // The engines' own; the third device has none.
    assert_eq!(bench.fake.count("contexts_created"), 2);
    assert_eq!(bench.fake.count("active_gpu2"), 0);
    drop(made);
    bench.end();
}

/// What is refused, with its kind and some of its reason.
fn refused(bench: &Bench, address: u64, length: u64, kind: ErrorKind, reason: &str) {
    let error = region(&bench.cuda, address, length).unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(reason), "{error}");
}

#[test]
fn what_is_not_device_memory_is_refused_with_the_reason() {
    let bench = Bench::new();
    let engine = &bench.engine;
    let invalid = ErrorKind::InvalidArgument;
    let host = vec![0u8; 4096];
    refused(&bench, host.as_ptr() as u64, 4096, invalid, "not known to CUDA");
    refused(
        &bench,
        engine.allocate_host(4096).unwrap(),
        4096,
        invalid,
        "page-locked host memory",
    );
    refused(
        &bench,
        engine.allocate_managed(4096).unwrap(),
        4096,
        invalid,
        "managed memory",
    );
    let device = engine.allocate(8192).unwrap();
    refused(&bench, device, 0, invalid, "length zero");
    refused(&bench, 0, 4096, invalid, "null");
    refused(&bench, device, u64::MAX, invalid, "overflow");
    engine.free(device).unwrap();
    refused(&bench, device, 8192, invalid, "freed memory");
    bench.end();
}

#[test]
fn a_range_that_leaves_its_memory_is_refused() {
    let bench = Bench::new();
    let engine = &bench.engine;
    let (first, second) = (engine.allocate(2 << 20).unwrap(), engine.allocate(2 << 20).unwrap());
    let outside = ErrorKind::OutOfBounds;
    refused(&bench, first, 2 * MIB + 1, outside, "ends 1 bytes before it");
    // Also where other memory follows.
    refused(&bench, first.min(second), 4 * MIB, outside, "inside one allocation");
    let lengths = [2 << 20, 2 << 20];
    let mapped = engine.map(&lengths, true).unwrap();
    refused(&bench, mapped + MIB, 4 * MIB, outside, "of it from");
    engine.unmap(mapped, &lengths).unwrap();
    bench.end();
}

#[test]
fn memory_of_a_context_that_is_not_the_primary_one_is_refused() {
    let bench = Bench::new();
    let other = bench.engine.run(|| other_context(&bench.fake)).unwrap();
    refused(
        &bench,
        other,
        4096,
        ErrorKind::InvalidArgument,
        "not the device's primary one",
    );
    // The same where the primary one is not even there, and it is not made for that.
    let fake = FakeCuda::new().unwrap();
    let engine = fake.engine(0).unwrap();
    let elsewhere = engine.run(|| other_context_on(&fake, 1)).unwrap();
    let cuda = Cuda::load(&config(&fake, Gather::Auto)).unwrap();
    let error = region(&cuda, elsewhere, 4096).unwrap_err();
    assert!(error.to_string().contains("not the device's primary one"), "{error}");
    assert_eq!(fake.count("cuDevicePrimaryCtxRetain"), 0);
    bench.end();
}

fn other_context(fake: &FakeCuda) -> u64 {
    other_context_on(fake, 0)
}

/// Memory of a context that was made, not retained.
fn other_context_on(fake: &FakeCuda, device: i32) -> u64 {
    type Create = unsafe extern "C" fn(*mut usize, u32, i32) -> u32;
    type Allocate = unsafe extern "C" fn(*mut u64, usize) -> u32;
    type Pop = unsafe extern "C" fn(*mut usize) -> u32;
    // SAFETY: the library is loaded already; the symbols have these types, and write what they are given places for.
    unsafe {
        let library = libloading::Library::new(fake.library_path()).unwrap();
        let (mut context, mut address) = (0, 0);
        assert_eq!(
            library.get::<Create>(b"cuCtxCreate_v2").unwrap()(&mut context, 0, device),
            0
        );
        assert_eq!(
            library.get::<Allocate>(b"cuMemAlloc_v2").unwrap()(&mut address, 4096),
            0
        );
        assert_eq!(library.get::<Pop>(b"cuCtxPopCurrent_v2").unwrap()(&mut context), 0);
        address
    }
}

#[test]
fn mappings_in_one_range_are_one_region() {
    let bench = Bench::new();
    let lengths = [2 << 20, 2 << 20, 4 << 20];
    let mapped = bench.engine.map(&lengths, true).unwrap();
    let made = region(&bench.cuda, mapped + 100, 7 * MIB).unwrap();
    let bytes = common::pattern(7 << 20, 1);
    made.copy_in(0, &bytes).unwrap();
    assert!(bench.fake.read(mapped + 100, 7 << 20).unwrap() == bytes);
    made.domain().verify(&made).unwrap();
    drop(made);
    bench.engine.unmap(mapped, &lengths).unwrap();
    bench.end();
}

#[test]
fn memory_that_was_freed_and_allocated_anew_is_noticed() {
    let bench = Bench::new();
    let memory = bench.engine.allocate(2 << 20).unwrap();
    let made = region(&bench.cuda, memory, 2 * MIB).unwrap();
    made.domain().verify(&made).unwrap();
    bench.engine.free(memory).unwrap();
    let gone = made.domain().verify(&made).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotRegistered, "{gone}");
    let again = bench.engine.allocate(2 << 20).unwrap();
    assert_eq!(again, memory, "the driver gives freed addresses again");
    assert_eq!(
        made.domain().verify(&made).unwrap_err().kind(),
        ErrorKind::NotRegistered
    );
    // A region of the new memory at the same address is another one.
    let new = region(&bench.cuda, again, 2 * MIB).unwrap();
    new.domain().verify(&new).unwrap();
    assert_eq!(
        made.domain().verify(&made).unwrap_err().kind(),
        ErrorKind::NotRegistered
    );
    drop((made, new));
    bench.end();
}

#[test]
fn a_mapping_that_was_replaced_is_noticed() {
    let bench = Bench::new();
    let lengths = [2 << 20, 2 << 20];
    let mapped = bench.engine.map(&lengths, true).unwrap();
    let made = region(&bench.cuda, mapped, 4 * MIB).unwrap();
    made.domain().verify(&made).unwrap();
    bench.engine.unmap(mapped, &lengths).unwrap();
    assert_eq!(
        made.domain().verify(&made).unwrap_err().kind(),
        ErrorKind::NotRegistered
    );
    drop(made);
    bench.end();
}

#[test]
fn regions_of_others_are_not_known() {
    let bench = Bench::new();
    let made = bench.region(4096);
    let host = Region::allocate(4096).unwrap();
    assert_eq!(
        made.domain().verify(&host).unwrap_err().kind(),
        ErrorKind::NotRegistered
    );
    assert!(made.domain().peer_address(&host).is_none());
    drop(made);
    bench.end();
}

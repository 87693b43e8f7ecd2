//! What only fake devices can be made to do: limits, refusals, events, dmabufs.

use std::os::fd::AsFd;
use std::slice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvxfer_core::memory::{DmaBuf, Region};
use kvxfer_core::transport::RegionAccess;
use kvxfer_core::{Error, ErrorKind, Result};
use kvxfer_fake_verbs::FakeFabric;
use kvxfer_rdma::probe::{Availability, Level, ProbeOptions, probe};
use kvxfer_rdma::registry::{Registry, RegistryOptions, RemoteRegions};
use kvxfer_rdma::verbs::{
    Access, AsyncEventKind, CompletionBuffer, Context, DmabufSupport, ForkStatus, Library, Operation, QueuePair,
    Request, SendBatch, Sge, Status, VerbsError,
};

use crate::ends::{
    CAPACITY, End, LIMIT, Port, completions, connected, connected_in, pair_of, pattern, ports_of, request,
};
use crate::registry::hidden;

const BOTH: RegionAccess = RegionAccess {
    serves: true,
    receives: true,
};

fn fabric(settings: &[(&str, &str, &str)]) -> FakeFabric {
    FakeFabric::with(settings).unwrap()
}

fn ports(fabric: &FakeFabric) -> [Port; 2] {
    pair_of(ports_of(Some(fabric.library_path()))).unwrap()
}

fn probed(fabric: &FakeFabric, devices: &[&str]) -> Availability {
    probe(&ProbeOptions {
        library: Some(fabric.library_path()),
        devices: devices.iter().map(|name| (*name).to_owned()).collect(),
        gid_index: None,
    })
}

/// The one line that says why `name` is refused.
fn refusal(found: &Availability, name: &str) -> String {
    let prefix = format!("{name}:");
    let mut lines = found.lines().into_iter().filter(|line| line.text.starts_with(&prefix));
    let line = lines.find(|line| line.level == Level::Refused);
    line.unwrap_or_else(|| panic!("{name} is not refused:\n{found}"))
        .to_string()
}

#[test]
fn the_probe_names_what_is_wrong_with_each_port() {
    let fabric = fabric(&[
        ("*", "devices", "8"),
        ("fake0", "port_state", "down"),
        ("fake1", "transport", "iwarp"),
        ("fake2", "gids", "none"),
        ("fake3", "fail", "open_device:EACCES"),
        ("fake4", "fail", "query_port:ENODEV"),
        ("fake5", "link_layer", "infiniband"),
        ("fake5", "gids", "fe80::1/ib"),
        ("fake6", "fail", "open_device:ENOENT"),
    ]);
    let found = probed(&fabric, &[]);
    for (name, why, remedy) in [
        ("fake0:1", "the port is down", "bring its link up"),
        ("fake1", "iWARP has no writes with immediates", "tcp transport"),
        ("fake2:1", "active, but no GID", "an IP address"),
        ("fake3", "may not be opened", "/dev/infiniband/uverbs*"),
        ("fake4:1", "ENODEV", "see `dmesg`"),
        ("fake5:1", "no LID", "subnet manager"),
        ("fake6", "is not there", "pass /dev/infiniband"),
    ] {
        let line = refusal(&found, name);
        assert!(line.contains(why) && line.contains(remedy), "{line}");
    }
    let usable: Vec<&str> = found
        .usable()
        .map(|(device, _, _)| device.listing.name.as_str())
        .collect();
    assert_eq!(usable, ["fake7"]);
    assert!(found.refusal().is_none());

    let named = probed(&fabric, &["fake0", "fake7:2", "fake9"]);
    let error = named.refusal().unwrap().to_string();
    for part in [
        "the port is down",
        "fake7:2: in rdma.devices",
        "fake9: in rdma.devices",
        "fake5: not in the allow-list",
    ] {
        assert!(error.contains(part), "{part} is not in {error}");
    }
}

#[test]
fn a_library_without_devices_is_that() {
    let fabric = fabric(&[("*", "devices", "0")]);
    let found = probed(&fabric, &[]);
    assert!(matches!(found, Availability::NoDevices { why: None, .. }), "{found}");
    assert_eq!(found.refusal().unwrap().kind(), ErrorKind::Unsupported);
}

#[test]
fn a_registration_that_is_refused_midway_is_undone() {
    let fabric = fabric(&[("fake1", "memlock_bytes", "300000")]);
    let ends = ports(&fabric).map(|port| End::new(&port));
    let options = RegistryOptions {
        registration_threads: 2,
        ..RegistryOptions::default()
    };
    let domains = ends.iter().map(|end| end.domain.clone()).collect();
    let registry = Registry::new(domains, options).unwrap();
    let regions: Vec<Arc<Region>> = (0..4).map(|_| Region::allocate(100_000).unwrap()).collect();
    let error = registry.register(&regions, BOTH).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::ResourceExhausted, "{error}");
    let text = error.to_string();
    assert!(text.contains("device fake1, region of 100000 bytes in host"), "{text}");
    assert!(
        text.contains("97.6 KiB") && (text.contains("memlock") || text.contains("max_map_count")),
        "{text}"
    );
    assert!(registry.is_empty() && regions.iter().all(|region| Arc::strong_count(region) == 1));
    // All of the limit is free again.
    let registered = registry.register(&regions[..3], BOTH).unwrap();
    drop(registered);
    assert!(registry.wait_retired(LIMIT));
    assert!(registry.register(&regions[1..], BOTH).is_ok());
}

#[test]
fn a_region_is_cut_where_the_smallest_device_ends() {
    let fabric = fabric(&[("fake1", "max_mr_size", "70000")]);
    let ends = ports(&fabric).map(|port| End::new(&port));
    let domains = ends.iter().map(|end| end.domain.clone()).collect();
    let registry = Registry::new(domains, RegistryOptions::default()).unwrap();
    let region = Region::allocate(200_000).unwrap();
    let registered = registry.register(slice::from_ref(&region), BOTH).unwrap();
    let remote = RemoteRegions::parse(&registered.keys).unwrap();
    for device in 0..2 {
        let first = remote.locate(0, 0, 200_000, device).unwrap();
        assert_eq!(first.until_edge, 69_632, "whole pages");
        let last = remote.locate(0, 199_999, 1, device).unwrap();
        assert_ne!(first.rkey, last.rkey);
    }
    let error = End::new(&ends[1].port).domain.register_too_large(200_000);
    assert!(
        error.to_string().contains("the device registers at most 68.3 KiB"),
        "{error}"
    );
}

trait RegisterTooLarge {
    fn register_too_large(&self, bytes: usize) -> VerbsError;
}

impl RegisterTooLarge for kvxfer_rdma::verbs::ProtectionDomain {
    fn register_too_large(&self, bytes: usize) -> VerbsError {
        let memory = vec![0u8; bytes];
        // SAFETY: the memory outlives the registration, which is refused or dropped in this statement.
        unsafe { self.register(memory.as_ptr() as u64, bytes as u64, Access::default()) }.unwrap_err()
    }
}

/// The first mapping of memory that the host cannot see ends here.
const FIRST_MAPPING: u64 = 41 * 4096;

/// Memfds of fixed patterns, as the dmabufs of memory that the host cannot see and that has two mappings.
fn device_memory() -> Result<Vec<DmaBuf>> {
    let dmabuf = |seed, offset, length| {
        let fd = rustix::fs::memfd_create("kvxfer-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 1 << 20).unwrap();
        let bytes: Vec<u8> = (0..1 << 20).map(pattern(seed)).collect();
        assert_eq!(rustix::io::pwrite(&fd, &bytes, 0).unwrap(), bytes.len());
        DmaBuf { fd, offset, length }
    };
    Ok(vec![
        dmabuf(9, 8192, FIRST_MAPPING),
        dmabuf(10, 4096, 300_000 - FIRST_MAPPING),
    ])
}

#[test]
fn memory_that_the_host_cannot_see_moves_through_its_dmabuf() {
    let fabric = fabric(&[("*", "dmabuf", "on"), ("fake1", "max_mr_size", "131072")]);
    let [mut a, b] = connected(&ports(&fabric));
    assert_eq!(b.domain.dmabuf_support(), DmabufSupport::Yes);
    let into = a.memory(
        300_000,
        Access {
            local_write: true,
            ..Access::default()
        },
    );
    let registry = Registry::new(vec![b.domain.clone()], RegistryOptions::default()).unwrap();
    let region = hidden(300_000, Some(device_memory));
    let registered = registry.register(slice::from_ref(&region), BOTH).unwrap();
    let remote = RemoteRegions::parse(&registered.keys).unwrap();
    let (mut done, mut pieces) = (0, 0);
    while done < 300_000 {
        let key = remote.locate(0, done, 300_000 - done, 0).unwrap();
        assert_eq!(key.address, region.address() + done);
        let segment = Sge {
            address: into.address + done,
            length: key.until_edge as u32,
            lkey: into.region.lkey(),
        };
        let read = Request {
            wr_id: 1,
            operation: Operation::Read,
            remote_address: key.address,
            rkey: key.rkey,
            signalled: true,
            fence: false,
        };
        let mut batch = SendBatch::new(1, 1);
        assert!(batch.push(read, &[segment]));
        a.pair.post_send(&mut batch).unwrap();
        assert_eq!(completions(&a.sends, 1)[0].status, Status::Success);
        (done, pieces) = (done + key.until_edge, pieces + 1);
    }
    assert_eq!(pieces, 4, "two registrations of each mapping");
    let first = (8192..8192 + FIRST_MAPPING as usize).map(pattern(9));
    let second = (4096..4096 + 300_000 - FIRST_MAPPING as usize).map(pattern(10));
    let expected: Vec<u8> = first.chain(second).collect();
    assert_eq!(into.read(), expected);
}

#[test]
fn a_device_that_refuses_dmabufs_is_explained() {
    let fabric = fabric(&[]);
    let [port, _] = ports(&fabric);
    let end = End::new(&port);
    assert!(matches!(end.domain.dmabuf_support(), DmabufSupport::No(_)));
    let dmabuf = device_memory().unwrap().remove(0);
    let error = end
        .domain
        .register_dmabuf(dmabuf.fd.as_fd(), 0, 4096, 4096, Access::default())
        .unwrap_err();
    let shown = Error::from(error);
    assert_eq!(shown.kind(), ErrorKind::Unsupported);
    assert!(shown.to_string().contains("stage through host memory"), "{shown}");
}

/// The next event that is not one that needs nothing done.
fn event(context: &Context) -> AsyncEventKind {
    let deadline = Instant::now() + LIMIT;
    loop {
        match context.next_async_event().unwrap() {
            Some(event) if !matches!(event.kind, AsyncEventKind::Other(_)) => return event.kind,
            Some(_) => {}
            None => std::thread::sleep(Duration::from_millis(1)),
        }
        assert!(Instant::now() < deadline, "no event");
    }
}

#[test]
fn devices_report_what_happens_to_them() {
    let fabric = fabric(&[]);
    let [end, _peer] = connected(&ports(&fabric));
    let context = &end.port.context;
    assert_eq!(context.next_async_event().unwrap(), None);
    for (key, value, kind) in [
        ("port_state", "down", AsyncEventKind::PortDown(1)),
        ("port_state", "active", AsyncEventKind::PortActive(1)),
        ("gids", "::ffff:10.1.1.1/v2", AsyncEventKind::GidChange(1)),
        ("event", "lid_change", AsyncEventKind::LidChange(1)),
        ("event", "pkey_change", AsyncEventKind::PkeyChange(1)),
        ("event", "device_fatal", AsyncEventKind::DeviceFatal),
    ] {
        fabric.set_now("fake0", key, value).unwrap();
        assert_eq!(event(context), kind, "{key} = {value}");
    }
    fabric
        .set_now("fake0", "event", &format!("qp_fatal:{}", end.pair.number()))
        .unwrap();
    assert_eq!(event(context), AsyncEventKind::QpFatal(end.pair.number()));
}

#[test]
fn every_refusal_names_verb_and_device() {
    let fabric = fabric(&[]);
    let [port, _] = ports(&fabric);
    let end = End::new(&port);
    end.init();
    let context = &end.port.context;
    let set = |verb: &str, errno: &str| fabric.set_now("fake0", "fail", &format!("{verb}:{errno}:1")).unwrap();
    let check = |error: VerbsError, verb: &str, errno: i32| {
        assert_eq!(
            (error.verb(), error.device(), error.errno()),
            (verb, Some("fake0"), Some(errno)),
            "{error}"
        );
        error
    };
    set("create_qp", "ENOMEM");
    let error = QueuePair::new(&end.domain, &end.sends, &end.receives, CAPACITY).unwrap_err();
    assert!(
        check(error, "ibv_create_qp", libc::ENOMEM)
            .to_string()
            .contains("queue pairs in all")
    );
    set("create_cq", "ENOMEM");
    let error = kvxfer_rdma::verbs::CompletionQueue::new(context, 4, None).unwrap_err();
    check(error, "ibv_create_cq", libc::ENOMEM);
    set("alloc_pd", "ENOSPC");
    let error = kvxfer_rdma::verbs::ProtectionDomain::new(context).unwrap_err();
    check(error, "ibv_alloc_pd", libc::ENOSPC);
    set("create_comp_channel", "EIO");
    let error = kvxfer_rdma::verbs::CompletionChannel::new(context).unwrap_err();
    check(error, "ibv_create_comp_channel", libc::EIO);
    set("modify_qp", "ENETUNREACH");
    let mut aimed = End::new(&port);
    aimed.aim(&port);
    let error = end.pair.to_receive(&aimed.receive_state(7, 0)).unwrap_err();
    let error = check(error, "ibv_modify_qp", libc::ENETUNREACH);
    assert!(error.to_string().contains("does not resolve"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Transport);
    set("modify_qp", "EIO");
    check(end.pair.to_error().unwrap_err(), "ibv_modify_qp", libc::EIO);
    set("query_qp", "ENODEV");
    check(end.pair.state().unwrap_err(), "ibv_query_qp", libc::ENODEV);
    set("poll_cq", "EIO");
    check(
        end.sends.poll(&mut CompletionBuffer::new(1)).unwrap_err(),
        "ibv_poll_cq",
        libc::EIO,
    );
    set("req_notify_cq", "EIO");
    check(end.sends.request_notify().unwrap_err(), "ibv_req_notify_cq", libc::EIO);
    set("query_device", "EIO");
    let library = context.library().clone();
    check(
        Context::open(&library, "fake0").unwrap_err(),
        "ibv_query_device",
        libc::EIO,
    );
    set("query_gid_ex", "EIO");
    check(context.gids(1).unwrap_err(), "ibv_query_gid_ex", libc::EIO);
    // A device that does not let go of a queue pair: it stays, with all it needs, and so does its context.
    set("destroy_qp", "EBUSY");
    check(aimed.pair.destroy().unwrap_err(), "ibv_destroy_qp", libc::EBUSY);
}

#[test]
fn without_the_newer_query_gids_are_still_read() {
    let fabric = fabric(&[
        ("fake0", "fail", "query_gid_ex:EOPNOTSUPP"),
        ("fake0", "gids", "empty, fe80::1/v1"),
    ]);
    let library = Library::load(Some(&fabric.library_path())).unwrap();
    let context = Context::open(&library, "fake0").unwrap();
    let gids = context.gids(1).unwrap();
    assert_eq!(gids.len(), 1, "the empty one is left out");
    assert_eq!(gids[0].index, 1);
}

#[test]
fn a_send_that_the_device_refuses_reports_where_it_stopped() {
    let fabric = fabric(&[]);
    let [mut a, b] = connected(&ports(&fabric));
    let target = b.memory(
        4096,
        Access {
            local_write: true,
            remote_write: true,
            ..Access::default()
        },
    );
    let mut batch = SendBatch::new(3, 1);
    for wr_id in 0..3 {
        let write = Request {
            wr_id,
            operation: Operation::Write,
            remote_address: target.address,
            rkey: target.region.rkey(),
            signalled: true,
            fence: false,
        };
        assert!(batch.push(write, &[]));
    }
    fabric.set_now("fake0", "fail", "post_send:EIO:1").unwrap();
    let error = a.pair.post_send(&mut batch).unwrap_err();
    assert_eq!((error.posted, error.source.errno()), (0, Some(libc::EIO)), "{error}");
    assert_eq!(error.source.device(), Some("fake0"));
    assert_eq!(a.sends.poll(&mut CompletionBuffer::new(4)).unwrap(), 0);
}

/// A device that keeps accepted bytes back for a minute, and lets go of those of a region only when that region is read:
/// the flush of a pool that only receives reads little, with a key that no peer knows, and is enough.
#[test]
fn a_flush_reaches_every_registration_of_a_pool_that_only_receives() {
    let fabric = fabric(&[
        ("fake1", "late_placement_us", "60000000"),
        ("fake1", "flush_scope", "region"),
        ("fake1", "max_mr_size", "65536"),
    ]);
    let [mut a, b] = connected(&ports(&fabric));
    let registry = Registry::new(vec![b.domain.clone()], RegistryOptions::default()).unwrap();
    let region = Region::allocate(200_000).unwrap();
    let receives = RegionAccess {
        serves: false,
        receives: true,
    };
    let registered = registry.register(slice::from_ref(&region), receives).unwrap();
    let remote = RemoteRegions::parse(&registered.keys).unwrap();
    let source = a.memory(200_000, Access::default());
    source.fill(pattern(4));
    let mut batch = SendBatch::new(8, 8);
    let mut done = 0;
    while done < 200_000 {
        let key = remote.locate(0, done, 1, 0).unwrap();
        let segment = Sge {
            address: source.address + done,
            length: key.until_edge as u32,
            lkey: source.region.lkey(),
        };
        assert!(batch.push(request(1, Operation::Write, key.address, key.rkey), &[segment]));
        done += key.until_edge;
    }
    let writes = batch.len();
    a.pair.post_send(&mut batch).unwrap();
    completions(&a.sends, writes);
    let mut got = vec![0; 200_000];
    region.copy_out(0, &mut got).unwrap();
    assert!(got.iter().all(|&byte| byte == 0), "bytes are late");

    // As the engine does: the queue pair to the peer is gone, the device reads its own memory.
    b.pair.destroy().unwrap();
    let same = [b.port.clone(), b.port.clone()];
    let [mut near, _far] = connected_in(&b.domain, &same);
    let into = near.memory(
        64,
        Access {
            local_write: true,
            ..Access::default()
        },
    );
    let keys = registry.written_by_peers();
    for target in keys.iter().flat_map(|keys| keys.flush_targets(0)) {
        let segment = Sge {
            address: into.address,
            length: 1,
            lkey: into.region.lkey(),
        };
        assert!(batch.push(request(1, Operation::Read, target.address, target.rkey), &[segment]));
    }
    assert_eq!(batch.len(), 4);
    near.pair.post_send(&mut batch).unwrap();
    assert!(
        completions(&near.sends, 4)
            .iter()
            .all(|one| one.status == Status::Success)
    );
    region.copy_out(0, &mut got).unwrap();
    assert_eq!(got, source.read());
}

#[test]
fn an_older_library_is_used_as_far_as_it_goes() {
    let fabric = fabric(&[("*", "gids", "::ffff:10.1.1.1/v1")]);
    let missing = |symbols: &[&str]| Library::load(Some(&fabric.library_without(symbols).unwrap()));
    let error = missing(&["ibv_create_qp"]).unwrap_err();
    assert!(
        matches!(
            error,
            VerbsError::MissingSymbol {
                symbol: "ibv_create_qp",
                ..
            }
        ),
        "{error:?}"
    );
    assert_eq!(error.kind(), ErrorKind::Unsupported);

    let library = missing(&[
        "ibv_reg_dmabuf_mr",
        "ibv_reg_mr_iova2",
        "_ibv_query_gid_ex",
        "ibv_is_fork_initialized",
    ])
    .unwrap();
    assert!(!library.knows_dmabuf());
    assert_eq!(library.fork_status(), ForkStatus::Unknown);
    let context = Context::open(&library, "fake0").unwrap();
    assert_eq!(context.gids(1).unwrap().len(), 1);
    let domain = kvxfer_rdma::verbs::ProtectionDomain::new(&context).unwrap();
    assert!(matches!(domain.dmabuf_support(), DmabufSupport::No(_)));
    let dmabuf = device_memory().unwrap().remove(0);
    let error = domain
        .register_dmabuf(dmabuf.fd.as_fd(), 0, 4096, 4096, Access::default())
        .unwrap_err();
    assert!(error.to_string().contains("rdma-core 34"), "{error}");
    let memory = vec![0u8; 4096];
    let relaxed = Access {
        relaxed_ordering: true,
        ..Access::default()
    };
    // SAFETY: the memory outlives the registration, which is dropped in this statement.
    unsafe { domain.register(memory.as_ptr() as u64, 4096, relaxed) }.unwrap();
}

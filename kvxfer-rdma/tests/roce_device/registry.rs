//! Regions registered on devices, and what peers are told of them.

use std::any::Any;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::memory::{CopyState, CopyTicket, DmaBuf, HostMemory, HostView, MemoryDomain, Region, Segment};
use kvxfer_core::transport::RegionAccess;
use kvxfer_core::{ErrorKind, Result};
use kvxfer_rdma::registry::{Registry, RegistryOptions, RemoteRegions};
use kvxfer_rdma::verbs::{DmabufSupport, Operation, ProtectionDomain, Request, SendBatch, Sge, Status};

use crate::ends::{End, LIMIT, are_real, completions, connected, pattern, two_ports};

const RECEIVES: RegionAccess = RegionAccess {
    serves: false,
    receives: true,
};
const SERVES: RegionAccess = RegionAccess {
    serves: true,
    receives: false,
};

fn registry(ends: &[&End]) -> Registry {
    let options = RegistryOptions {
        registration_threads: 3,
        chunk_bytes_max: 5 * 4096 + 17,
        ..RegistryOptions::default()
    };
    let domains: Vec<ProtectionDomain> = ends.iter().map(|end| end.domain.clone()).collect();
    Registry::new(domains, options).unwrap()
}

fn post(end: &mut End, operation: Operation, remote: (u64, u32), segment: Sge) -> Status {
    let mut batch = SendBatch::new(1, 1);
    let request = Request {
        wr_id: 1,
        operation,
        remote_address: remote.0,
        rkey: remote.1,
        signalled: true,
        fence: false,
    };
    assert!(batch.push(request, &[segment]));
    end.pair.post_send(&mut batch).unwrap();
    completions(&end.sends, 1)[0].status
}

#[test]
fn a_region_is_written_across_the_edges_of_its_registrations() {
    let Some(ports) = two_ports() else { return };
    let [mut a, b] = connected(&ports);
    // Not at a page's start: the first registration is shorter.
    let memory = Region::allocate(100_000).unwrap();
    // SAFETY: inside `memory`, which the keepalive keeps.
    let (source, target) = unsafe {
        let base = memory.address() as *mut u8;
        let part = |offset: usize, length| {
            Region::from_raw(base.add(offset), length, Arc::new(HostMemory), Box::new(memory.clone())).unwrap()
        };
        (part(100, 48_000), part(50_321, 48_000))
    };
    let ours = registry(&[&a]);
    let theirs = registry(&[&b]);
    let sent: Vec<u8> = (0..48_000).map(pattern(3)).collect();
    source.copy_in(0, &sent).unwrap();
    let _source_hold = ours.register(slice::from_ref(&source), SERVES).unwrap();
    let registered = theirs.register(&[target.clone(), source.clone()], RECEIVES).unwrap();
    let remote = RemoteRegions::parse(&registered.keys).unwrap();
    assert_eq!((remote.len(), remote.devices(), remote.access()), (2, 1, RECEIVES));
    let local = ours.local(&source).unwrap();

    let (mut done, mut pieces) = (0u64, 0);
    while done < 48_000 {
        let from = local.local(0, done).unwrap();
        let to = remote.locate(0, done, 48_000 - done, 0).unwrap();
        let length = from.until_edge.min(to.until_edge);
        let segment = Sge {
            address: from.address,
            length: length as u32,
            lkey: from.lkey,
        };
        assert_eq!(
            post(&mut a, Operation::Write, (to.address, to.rkey), segment),
            Status::Success
        );
        done += length;
        pieces += 1;
    }
    assert_eq!(pieces, 5, "three registrations on each side, whose edges differ");
    let mut got = vec![0; 48_000];
    target.copy_out(0, &mut got).unwrap();
    assert_eq!(got, sent);
    // One byte across an edge is refused by the device: the edges are real.
    let key = remote.locate(0, 0, 1, 0).unwrap();
    let across = Sge {
        address: local.local(0, 0).unwrap().address,
        length: 2,
        lkey: local.local(0, 0).unwrap().lkey,
    };
    let edge = (key.address + key.until_edge - 1, key.rkey);
    assert_eq!(post(&mut a, Operation::Write, edge, across), Status::RemoteAccess);
}

#[test]
fn a_pool_that_receives_is_not_readable_but_can_be_flushed() {
    let Some(ports) = two_ports() else { return };
    let [mut a, b] = connected(&ports);
    let into = a.memory(
        4096,
        kvxfer_rdma::verbs::Access {
            local_write: true,
            ..Default::default()
        },
    );
    let theirs = registry(&[&b]);
    let target = Region::allocate(60_000).unwrap();
    let registered = theirs.register(slice::from_ref(&target), RECEIVES).unwrap();
    let keys = theirs.local(&target).unwrap();
    let segment = Sge {
        address: into.address,
        length: 1,
        lkey: into.region.lkey(),
    };
    let targets: Vec<_> = keys.flush_targets(0).collect();
    assert_eq!(targets.len(), 3, "one for each registration");
    for flush in targets {
        assert_eq!(
            post(&mut a, Operation::Read, (flush.address, flush.rkey), segment),
            Status::Success
        );
    }
    let key = RemoteRegions::parse(&registered.keys)
        .unwrap()
        .locate(0, 0, 1, 0)
        .unwrap();
    assert_eq!(
        post(&mut a, Operation::Read, (key.address, key.rkey), segment),
        Status::RemoteAccess,
        "peers may write it, not read it"
    );
}

#[test]
fn keys_end_with_their_last_user() {
    let Some(ports) = two_ports() else { return };
    let [mut a, b] = connected(&ports);
    let source = a.memory(4096, kvxfer_rdma::verbs::Access::default());
    let theirs = registry(&[&b]);
    let target = Region::allocate(4096).unwrap();
    let registered = theirs.register(slice::from_ref(&target), RECEIVES).unwrap();
    let key = RemoteRegions::parse(&registered.keys)
        .unwrap()
        .locate(0, 0, 1, 0)
        .unwrap();
    let user = theirs.local(&target).unwrap();
    assert_eq!(theirs.len(), 1);
    drop(registered);
    assert!(
        theirs.local(&target).is_none() && theirs.is_empty(),
        "nobody finds it any more"
    );
    let segment = Sge {
        address: source.address,
        length: 8,
        lkey: source.region.lkey(),
    };
    assert_eq!(
        post(&mut a, Operation::Write, (key.address, key.rkey), segment),
        Status::Success,
        "it has a user"
    );
    drop(user);
    assert!(theirs.wait_retired(LIMIT));
    assert_eq!(Arc::strong_count(&target), 1, "the memory is let go of");
    assert_eq!(
        post(&mut a, Operation::Write, (key.address, key.rkey), segment),
        Status::RemoteAccess
    );
}

#[test]
fn two_registrations_of_a_region_are_told_apart_from_another_at_its_address() {
    let Some(ports) = two_ports() else { return };
    let end = End::new(&ports[0]);
    let registry = registry(&[&end]);
    let region = Region::allocate(8192).unwrap();
    // SAFETY: the same memory, kept by the first region.
    let twin = unsafe {
        let keep: Box<dyn Any + Send + Sync> = Box::new(region.clone());
        Region::from_raw(region.address() as *mut u8, 8192, Arc::new(HostMemory), keep).unwrap()
    };
    let receiving = registry.register(slice::from_ref(&region), RECEIVES).unwrap();
    let serving = registry.register(slice::from_ref(&region), SERVES).unwrap();
    assert!(
        registry.local(&twin).is_none(),
        "identity is the region, not its address"
    );
    assert_eq!(
        registry.local(&region).unwrap().access(),
        RECEIVES,
        "reads can land there"
    );
    drop(receiving);
    assert_eq!(registry.local(&region).unwrap().access(), SERVES);
    assert_eq!(
        registry.local(&region).unwrap().flush_targets(0).count(),
        0,
        "no peer writes it"
    );
    drop(serving);
    assert!(registry.local(&region).is_none());
}

#[test]
fn a_refusal_leaves_nothing_registered() {
    let Some(ports) = two_ports() else { return };
    let ends = [End::new(&ports[0]), End::new(&ports[1])];
    let registry = registry(&[&ends[0], &ends[1]]);
    let good = Region::allocate(100_000).unwrap();
    // Address space that nobody may touch: no device can be given it.
    let length = 8192;
    // SAFETY: a new mapping, which nothing else uses; it is left mapped until the process ends.
    let nowhere = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            length,
            rustix::mm::ProtFlags::empty(),
            rustix::mm::MapFlags::PRIVATE,
        )
    }
    .unwrap();
    // SAFETY: not what the contract asks for (that is the point), but nothing reads or writes it: the registration is
    // refused.
    let bad = unsafe { Region::from_raw(nowhere.cast(), length as u64, Arc::new(HostMemory), Box::new(())) }.unwrap();
    if !are_real() {
        println!("skipped: fake devices take any address");
        return;
    }
    let error = registry.register(&[good.clone(), bad], RECEIVES).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(error.to_string().contains("ibv_reg_mr"), "{error}");
    assert!(registry.is_empty() && registry.local(&good).is_none());
    assert!(registry.wait_retired(LIMIT));
    assert_eq!(Arc::strong_count(&good), 1);
    assert!(
        registry.register(&[good], RECEIVES).is_ok(),
        "and it can be registered afterwards"
    );
}

/// Memory that the host cannot see, with or without dmabufs, and an address that devices may know.
#[derive(Debug)]
struct Hidden {
    dmabufs: Option<fn() -> Result<Vec<DmaBuf>>>,
    peer: Option<u64>,
}

impl MemoryDomain for Hidden {
    fn name(&self) -> &str {
        "hidden"
    }
    fn host_view(&self, _: &Region, _: u64, _: u64) -> Option<HostView> {
        None
    }
    fn start_gather(&self, _: &[Arc<Region>], _: &[Segment], _: HostView) -> Result<CopyTicket> {
        Ok(CopyTicket(0))
    }
    fn start_scatter(&self, _: HostView, _: &[Arc<Region>], _: &[Segment]) -> Result<CopyTicket> {
        Ok(CopyTicket(0))
    }
    fn poll_copy(&self, _: CopyTicket) -> Result<CopyState> {
        Ok(CopyState::Done)
    }
    fn copy_in(&self, _: &Region, _: u64, _: &[u8]) -> Result<()> {
        Ok(())
    }
    fn copy_out(&self, _: &Region, _: u64, _: &mut [u8]) -> Result<()> {
        Ok(())
    }
    fn dmabufs(&self, _: &Region) -> Option<Result<Vec<DmaBuf>>> {
        self.dmabufs.map(|make| make())
    }
    fn peer_address(&self, _: &Region) -> Option<u64> {
        self.peer
    }
}

const HIDDEN: u64 = 0x7000_0000_0000;

fn hidden_at(address: u64, length: u64, domain: Hidden) -> Arc<Region> {
    // SAFETY: the domain never touches the address.
    unsafe { Region::from_raw(address as *mut u8, length, Arc::new(domain), Box::new(())) }.unwrap()
}

pub(crate) fn hidden(length: u64, dmabufs: Option<fn() -> Result<Vec<DmaBuf>>>) -> Arc<Region> {
    hidden_at(HIDDEN, length, Hidden { dmabufs, peer: None })
}

/// A memfd stands in for a dmabuf: devices that know dmabufs say what they think of it.
fn memfd(offset: u64, length: u64) -> DmaBuf {
    let fd = rustix::fs::memfd_create("kvxfer-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 1 << 20).unwrap();
    DmaBuf { fd, offset, length }
}

/// Two mappings, of 5 pages and a bit and of the rest, and one of a whole registration's length between them.
fn three_mappings() -> Result<Vec<DmaBuf>> {
    Ok(vec![memfd(4096, 6 * 4096), memfd(0, 5 * 4096), memfd(8192, 80_000)])
}

/// What a registration says of memory that no device was given.
fn staging_note(registry: &Registry, region: Arc<Region>) -> String {
    let registered = registry.register(&[region], RECEIVES).unwrap();
    let remote = RemoteRegions::parse(&registered.keys).unwrap();
    assert!(remote.is_staged() && !remote.is_visible() && remote.locate(0, 0, 1, 0).is_none());
    assert_eq!(registry.notes(), registered.notes);
    registered.notes.join("\n")
}

#[test]
fn memory_that_no_device_can_be_given_goes_through_staging_and_says_why() {
    let Some(ports) = two_ports() else { return };
    let end = End::new(&ports[0]);
    let registry = registry(&[&end]);
    let note = staging_note(&registry, hidden(4096, None));
    assert!(
        note.contains("hidden memory") && note.contains("goes through staging"),
        "{note}"
    );
    assert!(note.contains("dmabuf: its domain makes none"), "{note}");
    assert!(note.contains("peer memory: its domain names no address"), "{note}");
    let refusing = || Err(kvxfer_core::Error::new(ErrorKind::Unsupported, "not exported today"));
    let note = staging_note(&registry, hidden(4096, Some(refusing)));
    assert!(
        note.contains("dmabuf: ") && note.contains("not exported today"),
        "{note}"
    );
    // An address that nothing knows.
    let domain = Hidden {
        dmabufs: None,
        peer: Some(HIDDEN),
    };
    let note = staging_note(&registry, hidden_at(HIDDEN, 4096, domain));
    assert!(note.contains("peer memory: ") && note.contains("ibv_reg_mr"), "{note}");
    assert!(registry.is_empty() && registry.wait_retired(LIMIT));
    // Host memory beside it is reached as ever.
    let host = Region::allocate(100_000).unwrap();
    let both = registry
        .register(&[host.clone(), hidden(4096, None)], RECEIVES)
        .unwrap();
    let remote = RemoteRegions::parse(&both.keys).unwrap();
    assert!(remote.is_staged() && remote.locate(0, 99_999, 1, 0).is_some() && remote.locate(1, 0, 1, 0).is_none());
    assert!(!registry.local(&host).unwrap().is_staged());
}

#[test]
fn memory_of_several_mappings_has_a_registration_for_each() {
    let Some(ports) = two_ports() else { return };
    let ends = [End::new(&ports[0]), End::new(&ports[1])];
    let registry = registry(&[&ends[0], &ends[1]]);
    let short = registry
        .register(&[hidden(200_000, Some(three_mappings))], RECEIVES)
        .err()
        .unwrap();
    assert!(short.to_string().contains("too small"), "{short}");
    let long = registry
        .register(&[hidden(40_000, Some(three_mappings))], RECEIVES)
        .err()
        .unwrap();
    assert!(long.to_string().contains("more than the region needs"), "{long}");
    let region = hidden(100_000, Some(three_mappings));
    let registered = registry.register(slice::from_ref(&region), RECEIVES).unwrap();
    let remote = RemoteRegions::parse(&registered.keys).unwrap();
    match ends[0].domain.dmabuf_support() {
        DmabufSupport::Yes if !remote.is_staged() => {
            // Registrations have at most 5 pages: the mappings of 6, 5 and 14 pages are cut into 2, 1 and 3.
            let keys = registry.local(&region).unwrap();
            let mut edges = Vec::new();
            let mut at = 0;
            while at < 100_000 {
                let key = remote.locate(0, at, 1, 1).unwrap();
                assert_eq!(key.address, HIDDEN + at, "named by the address in its domain");
                assert_eq!(keys.local(1, at).unwrap().until_edge, key.until_edge);
                at += key.until_edge;
                edges.push(at);
            }
            let pages = |count: u64| count * 4096;
            assert_eq!(edges, [pages(5), pages(6), pages(11), pages(16), pages(21), 100_000]);
            assert_eq!(keys.flush_targets(1).count(), 6);
        }
        // A memfd is no dmabuf.
        support => {
            println!("no memfd here: {support}");
            let note = registered.notes.join(" ");
            assert!(remote.is_staged() && note.contains("dmabuf: "), "{note}");
        }
    }
}

#[test]
fn more_keys_than_a_peer_can_be_told_are_refused_before_anything_is_pinned() {
    let Some(ports) = two_ports() else { return };
    let end = End::new(&ports[0]);
    let options = RegistryOptions {
        chunk_bytes_max: 1,
        progress_every: Duration::ZERO,
        ..RegistryOptions::default()
    };
    let registry = Registry::new(vec![end.domain.clone()], options).unwrap();
    let region = Region::allocate(14_000 * 4096).unwrap();
    let error = registry.register(slice::from_ref(&region), RECEIVES).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::ResourceExhausted, "{error}");
    assert_eq!(Arc::strong_count(&region), 1);
}

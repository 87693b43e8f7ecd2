//! Devices, ports, limits, the state machine, events and misuse.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::os::fd::AsRawFd;
use std::time::Duration;

use common::{ALL_RIGHTS, Device, Options, Pair, Request, eventually, keys, load, peek};
use kvxfer_fake_verbs::FakeFabric;
use kvxfer_rdma::sys;

#[test]
fn a_fabric_has_as_many_devices_as_it_says() {
    let fabric = FakeFabric::with(&[("*", "devices", "0")]).unwrap();
    let verbs = load(&fabric);
    let mut count = -1;
    // SAFETY: as the verb's.
    unsafe {
        let list = verbs.ibv_get_device_list(&raw mut count);
        assert!(!list.is_null());
        assert_eq!(count, 0);
        verbs.ibv_free_device_list(list);
        fabric.set("*", "devices", "5").unwrap();
        verbs.ibv_free_device_list(verbs.ibv_get_device_list(&raw mut count));
    }
    assert_eq!(count, 5);
}

#[test]
fn a_device_sits_where_it_is_placed() {
    let fabric = FakeFabric::new().unwrap();
    fabric
        .place("fake1", 1, "pci0000:16/0000:16:01.0/0000:17:00.0")
        .unwrap();
    let device = Device::open(&load(&fabric), "fake1");
    // SAFETY: a live context, whose device has a path that ends with a zero.
    let path = unsafe { std::ffi::CStr::from_ptr((*(*device.context).device).ibdev_path.as_ptr()) };
    let path = std::path::Path::new(path.to_str().unwrap()).join("device");
    assert_eq!(std::fs::read_to_string(path.join("numa_node")).unwrap(), "1\n");
    assert!(path.canonicalize().unwrap().ends_with("0000:16:01.0/0000:17:00.0"));
}

#[test]
fn misspelt_keys_and_values_are_refused() {
    assert!(FakeFabric::with(&[("*", "latency", "5")]).is_err());
    let fabric = FakeFabric::new().unwrap();
    assert!(fabric.set("fake0", "order", "random").is_err());
    assert!(fabric.set_now("fake0", "drop_percent", "101").is_err());
    assert!(fabric.set_now("fake9", "order", "in").is_err());
}

#[test]
fn ports_follow_the_configuration_and_tell_of_changes() {
    let fabric = FakeFabric::with(&[
        ("fake0", "link_layer", "infiniband"),
        ("fake0", "lid", "12"),
        ("fake1", "gids", "empty, fe80::7/v1, ::ffff:10.0.0.7/v2"),
        ("fake1", "ifindex", "3"),
        ("fake1", "active_mtu", "1024"),
    ])
    .unwrap();
    let verbs = load(&fabric);
    let (a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
    assert_eq!((a.port().lid, a.port().link_layer), (12, 1));
    let port = b.port();
    assert_eq!(
        (port.state, port.active_mtu, port.gid_tbl_len),
        (sys::IBV_PORT_ACTIVE, sys::IBV_MTU_1024, 3)
    );
    // SAFETY: a live context.
    unsafe {
        let mut entry: sys::ibv_gid_entry = std::mem::zeroed();
        let size = size_of::<sys::ibv_gid_entry>() as u64;
        assert_eq!(
            verbs._ibv_query_gid_ex(b.context, 1, 0, &raw mut entry, 0, size),
            libc::ENODATA
        );
        assert_eq!(verbs._ibv_query_gid_ex(b.context, 1, 1, &raw mut entry, 0, size), 0);
        assert_eq!((entry.gid_type, entry.ndev_ifindex), (sys::IBV_GID_TYPE_ROCE_V1, 3));
        assert_eq!(
            verbs._ibv_query_gid_ex(b.context, 1, 3, &raw mut entry, 0, size),
            libc::EINVAL
        );
    }
    // Through the file, as another process would see it.
    fabric.set("fake1", "port_state", "down").unwrap();
    assert_eq!(b.event(), Some(sys::IBV_EVENT_PORT_ERR));
    assert_eq!(b.port().state, sys::IBV_PORT_DOWN);
    fabric.set("fake1", "port_state", "active").unwrap();
    assert_eq!(b.event(), Some(sys::IBV_EVENT_PORT_ACTIVE));
    fabric.set("fake1", "gids", "none").unwrap();
    assert_eq!(b.event(), Some(sys::IBV_EVENT_GID_CHANGE));
    assert_eq!(b.port().gid_tbl_len, 0);
    for (value, expected) in [
        ("port_down:1", sys::IBV_EVENT_PORT_ERR),
        ("port_down:1#2", sys::IBV_EVENT_PORT_ERR),
        ("device_fatal", sys::IBV_EVENT_DEVICE_FATAL),
    ] {
        fabric.set("fake1", "event", value).unwrap();
        assert_eq!(b.event(), Some(expected));
    }
    assert_eq!(fabric.counter("fake0", "events"), 0);
}

#[test]
fn infiniband_is_addressed_by_lid() {
    let fabric = FakeFabric::with(&[
        ("*", "link_layer", "infiniband"),
        ("fake0", "lid", "1"),
        ("fake1", "lid", "2"),
    ])
    .unwrap();
    let verbs = load(&fabric);
    let (a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
    let (left, right) = (Pair::new(&a, Options::default()), Pair::new(&b, Options::default()));
    for (pair, peer, lid) in [(&left, right.number(), 2), (&right, left.number(), 1)] {
        assert_eq!(pair.init(), 0);
        let needed = sys::IBV_QP_STATE
            | sys::IBV_QP_AV
            | sys::IBV_QP_PATH_MTU
            | sys::IBV_QP_DEST_QPN
            | sys::IBV_QP_RQ_PSN
            | sys::IBV_QP_MAX_DEST_RD_ATOMIC
            | sys::IBV_QP_MIN_RNR_TIMER;
        let set = |attr: &mut sys::ibv_qp_attr| {
            attr.qp_state = sys::IBV_QPS_RTR;
            attr.path_mtu = sys::IBV_MTU_1024;
            attr.dest_qp_num = peer;
            attr.rq_psn = Options::default().psn;
            attr.ah_attr.dlid = lid;
            attr.ah_attr.port_num = 1;
        };
        assert_eq!(pair.modify(set, needed), 0);
        assert_eq!(pair.ready_to_send(), 0);
    }
    assert_eq!(right.post_receives(1, 1), 0);
    left.post(&[Request::immediate(1, 1)]);
    assert_eq!(a.wait(1)[0].status, sys::IBV_WC_SUCCESS);
}

#[test]
fn the_state_machine_checks_states_masks_and_values() {
    let fabric = FakeFabric::with(&[("*", "active_mtu", "1024")]).unwrap();
    let device = Device::open(&load(&fabric), "fake0");
    let pair = Pair::new(&device, Options::default());
    assert_eq!(pair.to(sys::IBV_QPS_INIT), libc::EINVAL, "attributes missing");
    assert_eq!(pair.ready_to_send(), libc::EINVAL, "not from RESET");
    assert_eq!(pair.post_receives(1, 1), libc::EINVAL);
    assert_eq!(pair.try_post(&[Request::immediate(1, 1)]), (libc::EINVAL, 0));
    assert_eq!(pair.init(), 0);
    assert_eq!(pair.post_receives(1, 1), 0);
    assert_eq!(pair.ready_to_receive(7, [0; 16]), libc::EINVAL, "no address");
    let big = |attr: &mut sys::ibv_qp_attr| {
        attr.qp_state = sys::IBV_QPS_INIT;
        attr.port_num = 2;
    };
    assert_eq!(
        pair.modify(big, sys::IBV_QP_STATE | sys::IBV_QP_PORT),
        libc::EINVAL,
        "no port 2"
    );
    assert_eq!(pair.ready_to_receive(7, device.gid(1)), 0);
    assert_eq!(
        pair.try_post(&[Request::immediate(1, 1)]),
        (libc::EINVAL, 0),
        "RTR sends nothing"
    );
    assert_eq!(pair.ready_to_send(), 0);
    assert_eq!(pair.init(), libc::EINVAL, "not from RTS");
    let mut attr: sys::ibv_qp_attr = unsafe_zeroed();
    let mut init: sys::ibv_qp_init_attr = unsafe_zeroed();
    // SAFETY: a live queue pair.
    let answer = unsafe {
        pair.verbs
            .ibv_query_qp(pair.qp, &raw mut attr, sys::IBV_QP_STATE as i32, &raw mut init)
    };
    assert_eq!(
        (answer, attr.qp_state, attr.dest_qp_num, init.cap.max_send_wr),
        (0, sys::IBV_QPS_RTS, 7, 256)
    );
    assert_eq!(pair.to(sys::IBV_QPS_ERR), 0);
    assert_eq!(pair.ready_to_send(), libc::EINVAL, "only RESET leaves ERR");
}

fn unsafe_zeroed<T>() -> T {
    // SAFETY: used for plain C structures only, for which all zero is valid.
    unsafe { std::mem::zeroed() }
}

#[test]
fn queues_have_ends() {
    let fabric = FakeFabric::with(&[("fake1", "network_hold", "on"), ("*", "max_msg_sz", "5000")]).unwrap();
    let verbs = load(&fabric);
    let (a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
    let options = Options {
        sends: 4,
        receives: 2,
        timeout: 20,
        ..Options::default()
    };
    let (left, right) = Pair::connected(&a, &b, options);
    assert_eq!(right.post_receives(1, 3), libc::ENOMEM);
    let six: Vec<Request> = (0..6)
        .map(|id| Request {
            opcode: sys::IBV_WR_RDMA_WRITE,
            ..Request::immediate(id, 0).unsignalled()
        })
        .collect();
    assert_eq!(left.try_post(&six), (libc::ENOMEM, 4));
    fabric.set_now("fake1", "network_hold", "off").unwrap();
    std::thread::sleep(Duration::from_millis(20));
    // Unsignalled requests give their slots back with the next completion that is polled, not before.
    assert_eq!(left.try_post(&six[..1]), (libc::ENOMEM, 0));
    let (left, _right) = Pair::connected(&a, &b, options);
    left.post(&[
        six[0].clone(),
        Request {
            unsignalled: false,
            ..six[1].clone()
        },
    ]);
    a.wait(1);
    left.post(&six[..4]);
    // Too long, too many pieces.
    let (left, _right) = Pair::connected(&a, &b, options);
    let long = Request {
        pieces: vec![(1, 5001, 1)],
        ..six[0].clone()
    };
    let scattered = Request {
        pieces: vec![(1, 1, 1); 17],
        ..six[0].clone()
    };
    assert_eq!(left.try_post(&[long]), (libc::EINVAL, 0));
    assert_eq!(left.try_post(&[scattered]), (libc::EINVAL, 0));
}

#[test]
fn a_completion_queue_that_overflows_is_dead() {
    let fabric = FakeFabric::new().unwrap();
    let verbs = load(&fabric);
    let (mut a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
    // SAFETY: a live context.
    a.cq = unsafe { verbs.ibv_create_cq(a.context, 3, std::ptr::null_mut(), std::ptr::null_mut(), 0) };
    let (left, _right) = Pair::connected(&a, &b, Options::default());
    let five: Vec<Request> = (0..5)
        .map(|id| Request {
            opcode: sys::IBV_WR_RDMA_WRITE,
            ..Request::immediate(id, 0)
        })
        .collect();
    left.post(&five);
    assert_eq!(a.event(), Some(sys::IBV_EVENT_CQ_ERR));
    assert_eq!(a.poll().len(), 3);
    std::thread::sleep(Duration::from_millis(20));
    assert!(a.poll().is_empty());
    assert_eq!(fabric.counter("fake0", "cq_overruns"), 1);
}

#[test]
fn completion_channels_tell_once_for_each_arming() {
    let fabric = FakeFabric::new().unwrap();
    let verbs = load(&fabric);
    let (a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
    let (left, right) = Pair::connected(&a, &b, Options::default());
    // SAFETY: live objects, here and below.
    let (fd, arm) = unsafe { ((*a.channel).fd, (*a.context).ops.req_notify_cq.unwrap()) };
    let readable = || {
        let mut entry = libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry.
        unsafe { libc::poll(&raw mut entry, 1, 0) == 1 }
    };
    // SAFETY: a descriptor of ours.
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) }, 0);
    let (mut cq, mut own) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: as above.
    let answer = unsafe { verbs.ibv_get_cq_event(a.channel, &raw mut cq, &raw mut own) };
    assert_eq!(answer, -1);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EAGAIN));
    assert_eq!(right.post_receives(1, 3), 0);
    left.post(&[Request::immediate(1, 0)]);
    a.wait(1);
    assert!(!readable(), "not armed");
    // SAFETY: as above.
    assert_eq!(unsafe { arm(a.cq, 0) }, 0);
    left.post(&[Request::immediate(2, 0), Request::immediate(3, 0)]);
    eventually("readable", readable);
    a.wait(2);
    // SAFETY: as above.
    unsafe {
        assert_eq!(verbs.ibv_get_cq_event(a.channel, &raw mut cq, &raw mut own), 0);
        assert_eq!(cq, a.cq);
        assert!(!readable(), "one event for both");
        left.destroy();
        right.destroy();
        assert_eq!(verbs.ibv_destroy_cq(a.cq), libc::EBUSY, "an event is not acknowledged");
        assert_eq!(fabric.counter("fake0", "misuse"), 1);
        verbs.ibv_ack_cq_events(a.cq, 1);
    }
    a.close();
}

#[test]
fn withheld_completions_come_when_they_are_let_go() {
    let fabric = FakeFabric::with(&[("fake0", "completions", "withhold")]).unwrap();
    let verbs = load(&fabric);
    let (a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
    let (left, right) = Pair::connected(&a, &b, Options::default());
    assert_eq!(right.post_receives(1, 2), 0);
    left.post(&[Request::immediate(1, 0), Request::immediate(2, 0)]);
    b.wait(2);
    std::thread::sleep(Duration::from_millis(20));
    assert!(a.poll().is_empty());
    fabric.set_now("fake0", "completions", "deliver").unwrap();
    assert_eq!(a.wait(2)[0].wr_id, 1);
}

#[test]
fn delayed_completions_come_later_and_in_order() {
    let fabric = FakeFabric::with(&[("fake0", "completion_delay_us", "600000")]).unwrap();
    let verbs = load(&fabric);
    let (a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
    let (left, right) = Pair::connected(&a, &b, Options::default());
    assert_eq!(right.post_receives(1, 2), 0);
    let start = std::time::Instant::now();
    left.post(&[Request::immediate(1, 0)]);
    b.wait(1);
    // The acknowledgement is there by then, and the completion made.
    std::thread::sleep(Duration::from_millis(200));
    fabric.set_now("fake0", "completion_delay_us", "0").unwrap();
    left.post(&[Request::immediate(2, 0)]);
    let both: Vec<u64> = a.wait(2).iter().map(|wc| wc.wr_id).collect();
    assert_eq!(both, [1, 2]);
    assert!(start.elapsed() >= Duration::from_millis(600));
}

#[test]
fn verbs_fail_as_often_as_they_are_told_to() {
    let fabric = FakeFabric::with(&[(
        "*",
        "fail",
        "open_device:EACCES:1, modify_qp.rts:EINVAL:1, post_send:ENOMEM:2",
    )])
    .unwrap();
    let verbs = load(&fabric);
    assert!(Device::try_open(&verbs, "fake0").is_none());
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EACCES));
    let a = Device::open(&verbs, "fake0");
    let own = Pair::new(&a, Options::default());
    assert_eq!(own.init(), 0);
    assert_eq!(own.ready_to_receive(own.number(), a.gid(1)), 0);
    assert_eq!(own.ready_to_send(), libc::EINVAL);
    assert_eq!(own.ready_to_send(), 0);
    let write = Request {
        opcode: sys::IBV_WR_RDMA_WRITE,
        ..Request::immediate(1, 0)
    };
    for _ in 0..2 {
        assert_eq!(own.try_post(std::slice::from_ref(&write)), (libc::ENOMEM, 0));
    }
    fabric.set_now("fake0", "fail", "post_send.one:EINVAL:1:2").unwrap();
    assert_eq!(own.try_post(&vec![write.clone(); 4]), (libc::EINVAL, 2));
    own.post(&[write]);
}

#[test]
fn a_library_can_lack_symbols() {
    let fabric = FakeFabric::new().unwrap();
    let path = fabric
        .library_without(&["ibv_reg_dmabuf_mr", "_ibv_query_gid_ex"])
        .unwrap();
    // SAFETY: a library made to be loaded.
    let verbs = unsafe { sys::Libibverbs::new(path) }.unwrap();
    assert!(verbs.ibv_reg_dmabuf_mr.is_err() && verbs._ibv_query_gid_ex.is_err());
    let device = Device::open(&std::sync::Arc::new(verbs), "fake1");
    assert_eq!(device.gid(1)[15], 2);
    assert!(fabric.library_without(&["ibv_dance"]).is_err());
}

#[test]
fn misuse_is_counted() {
    let fabric = FakeFabric::new().unwrap();
    let verbs = load(&fabric);
    let a = Device::open(&verbs, "fake0");
    let own = Pair::new(&a, Options::default());
    let (qp, post_send) = {
        // SAFETY: a live context.
        (own.qp, unsafe { (*a.context).ops.post_send.unwrap() })
    };
    // SAFETY: these calls are wrong on purpose; the fake never frees what they name.
    unsafe {
        assert_eq!(verbs.ibv_dealloc_pd(a.pd), libc::EBUSY);
        assert_eq!(verbs.ibv_destroy_cq(a.cq), libc::EBUSY);
        assert_eq!(verbs.ibv_close_device(a.context), libc::EBUSY);
        own.destroy();
        let mut bad = std::ptr::null_mut();
        let mut wr: sys::ibv_send_wr = std::mem::zeroed();
        assert_eq!(post_send(qp, &raw mut wr, &raw mut bad), libc::EINVAL);
        assert_eq!(verbs.ibv_destroy_qp(qp), libc::EINVAL);
    }
    assert_eq!(fabric.counter("fake0", "misuse"), 5);
    a.close();
}

#[test]
fn registering_has_limits_and_a_dmabuf_needs_the_key() {
    let fabric = FakeFabric::with(&[("fake0", "memlock_bytes", "10000"), ("fake0", "max_mr_size", "8000")]).unwrap();
    let verbs = load(&fabric);
    let (a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
    let mut memory = vec![0u8; 20_000];
    let mut register = |length: u64, access: u32| {
        // SAFETY: live memory.
        let mr = unsafe { verbs.ibv_reg_mr(a.pd, memory.as_mut_ptr().cast(), length, access as i32) };
        if mr.is_null() {
            std::io::Error::last_os_error().raw_os_error()
        } else {
            None
        }
    };
    assert_eq!(register(8001, ALL_RIGHTS), Some(libc::EINVAL));
    assert_eq!(
        register(100, sys::IBV_ACCESS_REMOTE_WRITE),
        Some(libc::EINVAL),
        "remote write needs local write"
    );
    assert_eq!(register(8000, ALL_RIGHTS), None);
    assert_eq!(register(2001, ALL_RIGHTS), Some(libc::ENOMEM));
    assert_eq!(register(2000, ALL_RIGHTS), None);
    // SAFETY: a name and flags.
    let fd = unsafe { libc::memfd_create(c"dmabuf".as_ptr(), 0) };
    // SAFETY: just made.
    let file = unsafe { <std::fs::File as std::os::fd::FromRawFd>::from_raw_fd(fd) };
    file.set_len(32_768).unwrap();
    let register = |offset: u64, iova: u64| {
        // SAFETY: a live domain and descriptor.
        let mr = unsafe { verbs.ibv_reg_dmabuf_mr(b.pd, offset, 10_000, iova, file.as_raw_fd(), ALL_RIGHTS as i32) };
        if mr.is_null() {
            Err(std::io::Error::last_os_error().raw_os_error().unwrap())
        } else {
            Ok(mr)
        }
    };
    assert_eq!(register(4096, 0x7000_0000).unwrap_err(), libc::EOPNOTSUPP);
    fabric.set_now("fake1", "dmabuf", "on").unwrap();
    assert_eq!(register(4097, 0x7000_0000).unwrap_err(), libc::EINVAL);
    let mr = register(4196, 0x7000_0064).unwrap();
    // Its addresses are device addresses: nothing is mapped there.
    let (left, _right) = Pair::connected(&a, &b, Options::default());
    let mut source = vec![5u8; 1000];
    fabric.set_now("fake0", "memlock_bytes", "20000").unwrap();
    let from = a.register(&mut source, ALL_RIGHTS);
    let (lkey, rkey) = (keys(from).0, keys(mr).1);
    left.post(&[Request::write(1, &source, lkey, 0x7000_0064 + 9000, rkey)]);
    assert_eq!(a.wait(1)[0].status, sys::IBV_WC_SUCCESS);
    let mut content = vec![0u8; 32_768];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut content, 0).unwrap();
    assert_eq!(
        (content[13_195], content[13_196], content[14_195], content[14_196]),
        (0, 5, 5, 0)
    );
    b.deregister(mr);
}

#[test]
fn memory_that_the_processor_cannot_read_needs_the_key_for_peer_memory() {
    const BYTES: usize = 12_288;
    let fabric = FakeFabric::with(&[]).unwrap();
    let verbs = load(&fabric);
    let (a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
    // SAFETY: a name and flags, then a descriptor that was just made.
    let file =
        unsafe { <std::fs::File as std::os::fd::FromRawFd>::from_raw_fd(libc::memfd_create(c"device".as_ptr(), 0)) };
    file.set_len(BYTES as u64).unwrap();
    let map = |flags, fd| {
        // SAFETY: a new mapping, wherever the system wants it; it stays until the process ends.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), BYTES, libc::PROT_NONE, flags, fd, 0) };
        assert!(mapped != libc::MAP_FAILED);
        mapped
    };
    let device = map(libc::MAP_SHARED, file.as_raw_fd());
    let private = map(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
    let register = |memory: *mut libc::c_void, offset: usize| {
        let first = memory.wrapping_byte_add(offset);
        // SAFETY: a live domain, and memory that stays mapped.
        let mr = unsafe { verbs.ibv_reg_mr(b.pd, first, (BYTES - offset) as u64, ALL_RIGHTS as i32) };
        if mr.is_null() {
            Err(std::io::Error::last_os_error().raw_os_error().unwrap())
        } else {
            Ok(mr)
        }
    };
    assert_eq!(register(device, 100).unwrap_err(), libc::EFAULT);
    fabric.set_now("fake1", "peer_memory", "on").unwrap();
    assert_eq!(
        register(private, 0).unwrap_err(),
        libc::EFAULT,
        "no other driver knows that"
    );
    let mr = register(device, 100).unwrap();
    let (left, _right) = Pair::connected(&a, &b, Options::default());
    let mut source = vec![5u8; 1000];
    let from = a.register(&mut source, ALL_RIGHTS);
    let target = device.addr() as u64 + 5000;
    left.post(&[Request::write(1, &source, keys(from).0, target, keys(mr).1)]);
    assert_eq!(a.wait(1)[0].status, sys::IBV_WC_SUCCESS);
    let mut content = vec![0u8; BYTES];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut content, 0).unwrap();
    assert_eq!(
        (content[4999], content[5000], content[5999], content[6000]),
        (0, 5, 5, 0)
    );
    b.deregister(mr);
}

#[test]
fn instant_mode_completes_inside_post_and_copies_nothing() {
    let fabric = FakeFabric::with(&[("*", "mode", "instant")]).unwrap();
    let verbs = load(&fabric);
    let (a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
    let (left, right) = Pair::connected(
        &a,
        &b,
        Options {
            sends: 8,
            ..Options::default()
        },
    );
    assert_eq!(right.post_receives(5, 1), 0);
    let mut target = vec![0u8; 4096];
    let source = vec![1u8; 4096];
    let to = b.register(&mut target, ALL_RIGHTS);
    let rkey = keys(to).1;
    let write = Request::write(1, &source, 0, target.as_ptr() as u64, rkey).unsignalled();
    left.post(&[write.clone(), write.clone(), Request::immediate(2, 3)]);
    assert_eq!(a.poll().len(), 1);
    assert_eq!(b.poll().len(), 1);
    assert_eq!(peek(&target, 0), 0);
    for _ in 0..100 {
        left.post(&[
            write.clone(),
            write.clone(),
            Request {
                unsignalled: false,
                ..write.clone()
            },
        ]);
        assert_eq!(a.poll().len(), 1);
    }
}

#[test]
fn bandwidth_and_latency_are_kept() {
    let fabric = FakeFabric::with(&[
        ("fake0", "bandwidth_bytes_per_s", "50000000"),
        ("*", "latency_us", "10000"),
    ])
    .unwrap();
    let verbs = load(&fabric);
    let (a, b) = (Device::open(&verbs, "fake0"), Device::open(&verbs, "fake1"));
    let (left, right) = Pair::connected(&a, &b, Options::default());
    assert_eq!(right.post_receives(5, 1), 0);
    let start = std::time::Instant::now();
    left.post(&[Request::immediate(1, 1)]);
    a.wait(1);
    assert!(start.elapsed() >= Duration::from_millis(20), "there and back");
    let mut memory = vec![0u8; 5_000_000];
    let mut target = vec![0u8; 5_000_000];
    let (from, to) = (a.register(&mut memory, ALL_RIGHTS), b.register(&mut target, ALL_RIGHTS));
    let (lkey, rkey) = (keys(from).0, keys(to).1);
    let start = std::time::Instant::now();
    left.post(&[Request::write(1, &memory, lkey, target.as_ptr() as u64, rkey)]);
    a.wait(1);
    let took = start.elapsed();
    println!("5 MB at 50 MB/s took {took:?}");
    assert!(
        took >= Duration::from_millis(100) && took < Duration::from_secs(2),
        "{took:?}"
    );
}

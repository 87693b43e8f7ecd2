//! Queue pairs that move bytes, fail, and are explained.

use std::time::Duration;

use kvxfer_core::{Error, ErrorKind};
use kvxfer_rdma::verbs::{
    Access, AsyncEventKind, CompletionBuffer, Context, ErrorClass, InitState, Mtu, Operation, QpState, Request,
    SendBatch, Sge, Status,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::ends::{CAPACITY, End, completions, connected, pattern, request, two_ports};

const ALL: Access = Access {
    local_write: true,
    remote_write: true,
    remote_read: true,
    relaxed_ordering: false,
};

#[test]
fn bytes_are_gathered_written_announced_and_read_back() {
    let Some(ports) = two_ports() else { return };
    let [mut a, mut b] = connected(&ports);
    let (source, target, back) = (
        a.memory(64 << 10, ALL),
        b.memory(64 << 10, ALL),
        a.memory(
            64 << 10,
            Access {
                relaxed_ordering: true,
                ..ALL
            },
        ),
    );
    source.fill(pattern(1));
    b.pair.post_receives(77, 3).unwrap();

    // Two writes, the first gathered backwards from three places; only the immediate's write reports.
    let mut batch = SendBatch::new(8, 16);
    let piece = |offset: u64, length: u32| Sge {
        address: source.address + offset,
        length,
        lkey: source.region.lkey(),
    };
    let quiet = Request {
        signalled: false,
        ..request(1, Operation::Write, target.address, target.region.rkey())
    };
    assert!(batch.push(quiet, &[piece(9000, 100), piece(5000, 3000), piece(0, 5000)]));
    let second = Request {
        wr_id: 2,
        remote_address: target.address + 8100,
        ..quiet
    };
    assert!(batch.push(second, &[piece(8100, 50_000)]));
    let close = request(
        3,
        Operation::WriteWithImmediate(0xfeed_beef),
        target.address,
        target.region.rkey(),
    );
    assert!(batch.push(close, &[]));
    a.pair.post_send(&mut batch).unwrap();
    assert!(batch.is_empty());

    let sent = completions(&a.sends, 1);
    assert_eq!(
        (sent[0].wr_id, sent[0].status, sent[0].is_receive),
        (3, Status::Success, Some(false))
    );
    assert_eq!(sent[0].qp_number, a.pair.number());
    let received = completions(&b.receives, 1);
    assert_eq!((received[0].wr_id, received[0].is_receive), (77, Some(true)));
    assert_eq!(received[0].immediate, Some(0xfeed_beef));
    assert_eq!(received[0].qp_number, b.pair.number());
    let (all, got) = (source.read(), target.read());
    assert_eq!(got[..100], all[9000..9100]);
    assert_eq!(got[100..3100], all[5000..8000]);
    assert_eq!(got[3100..8100], all[..5000]);
    assert_eq!(got[8100..58_100], all[8100..58_100]);
    assert!(got[58_100..].iter().all(|&byte| byte == 0));

    // And back, by a read.
    let into = Sge {
        address: back.address,
        length: 60_000,
        lkey: back.region.lkey(),
    };
    assert!(batch.push(
        request(4, Operation::Read, target.address, target.region.rkey()),
        &[into]
    ));
    a.pair.post_send(&mut batch).unwrap();
    assert_eq!(completions(&a.sends, 1)[0].status, Status::Success);
    assert_eq!(back.read()[..60_000], got[..60_000]);
}

#[test]
fn a_channel_wakes_once_for_each_request() {
    let Some(ports) = two_ports() else { return };
    let [mut a, mut b] = connected(&ports);
    let target = b.memory(4096, ALL);
    b.pair.post_receives(0, 4).unwrap();
    let mut batch = SendBatch::new(1, 1);
    let mut buffer = CompletionBuffer::new(4);
    let second = Timespec { tv_sec: 10, tv_nsec: 0 };
    for round in 0..3u32 {
        b.receives.request_notify().unwrap();
        assert_eq!(b.receives.poll(&mut buffer).unwrap(), 0);
        assert_eq!(b.channel.drain().unwrap(), 0, "nothing has come yet");
        let write = request(
            0,
            Operation::WriteWithImmediate(round),
            target.address,
            target.region.rkey(),
        );
        assert!(batch.push(write, &[]));
        a.pair.post_send(&mut batch).unwrap();
        let mut fds = [PollFd::from_borrowed_fd(b.channel.fd(), PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&second)).unwrap(), 1, "no wake-up");
        assert_eq!(b.channel.drain().unwrap(), 1);
        assert_eq!(completions(&b.receives, 1)[0].immediate, Some(round));
        completions(&a.sends, 1);
    }
    assert_eq!(b.channel.drain().unwrap(), 0);
}

#[test]
fn a_wrong_key_is_the_peers_refusal_and_flushes_the_rest() {
    let Some(ports) = two_ports() else { return };
    let [mut a, b] = connected(&ports);
    let (source, target) = (a.memory(8192, ALL), b.memory(8192, ALL));
    let mut batch = SendBatch::new(4, 4);
    let segment = Sge {
        address: source.address,
        length: 4096,
        lkey: source.region.lkey(),
    };
    // Beyond the end of the registration.
    let bad = request(1, Operation::Write, target.address + 4097, target.region.rkey());
    let unsignalled = Request {
        signalled: false,
        ..bad
    };
    assert!(batch.push(unsignalled, &[segment]));
    assert!(batch.push(
        request(2, Operation::Write, target.address, target.region.rkey()),
        &[segment]
    ));
    a.pair.post_send(&mut batch).unwrap();
    let ended = completions(&a.sends, 2);
    assert_eq!((ended[0].wr_id, ended[0].status), (1, Status::RemoteAccess));
    assert_eq!(ended[0].status.class(), ErrorClass::RemoteAccess);
    assert_eq!((ended[1].wr_id, ended[1].status), (2, Status::WorkRequestFlushed));
    assert_eq!(ended[1].is_receive, None);
    assert_eq!(a.pair.state().unwrap(), QpState::Error);
    assert!(target.read().iter().all(|&byte| byte == 0), "nothing was written");
}

#[test]
fn a_local_key_that_does_not_fit_is_our_bug() {
    let Some(ports) = two_ports() else { return };
    let [mut a, b] = connected(&ports);
    let (source, target) = (a.memory(4096, ALL), b.memory(8192, ALL));
    let mut batch = SendBatch::new(1, 1);
    let segment = Sge {
        address: source.address,
        length: 4097,
        lkey: source.region.lkey(),
    };
    assert!(batch.push(
        request(1, Operation::Write, target.address, target.region.rkey()),
        &[segment]
    ));
    // Some providers look before they take it.
    if let Err(error) = a.pair.post_send(&mut batch) {
        assert_eq!(error.posted, 0, "{error}");
        return;
    }
    let ended = completions(&a.sends, 1);
    assert_eq!(ended[0].status.class(), ErrorClass::LocalBug, "{ended:?}");
}

#[test]
fn an_immediate_without_a_receive_kills_the_rail() {
    let Some(ports) = two_ports() else { return };
    let [mut a, b] = connected(&ports);
    let target = b.memory(4096, ALL);
    let mut batch = SendBatch::new(1, 1);
    let write = request(
        1,
        Operation::WriteWithImmediate(1),
        target.address,
        target.region.rkey(),
    );
    assert!(batch.push(write, &[]));
    a.pair.post_send(&mut batch).unwrap();
    let ended = completions(&a.sends, 1);
    assert_eq!(ended[0].status, Status::ReceiverNotReadyExceeded);
    assert_eq!(ended[0].status.class(), ErrorClass::Transport);
}

#[test]
fn error_state_returns_every_receive() {
    let Some(ports) = two_ports() else { return };
    let [_a, mut b] = connected(&ports);
    b.pair.post_receives(5, 10).unwrap();
    b.pair.to_error().unwrap();
    let flushed = completions(&b.receives, 10);
    assert!(
        flushed
            .iter()
            .all(|one| one.status == Status::WorkRequestFlushed && one.wr_id == 5)
    );
    assert_eq!(b.pair.state().unwrap(), QpState::Error);
    b.pair.destroy().unwrap();
}

#[test]
fn a_queue_that_is_full_says_how_far_it_got() {
    let Some(ports) = two_ports() else { return };
    let [_, mut b] = connected(&ports);
    let room = b.pair.capacity().receive_requests;
    let error = b.pair.post_receives(1, room + 1000).unwrap_err();
    assert_eq!((error.verb(), error.errno()), ("ibv_post_recv", Some(libc::ENOMEM)));

    // A queue pair that is not yet connected takes no sends; what the provider says is not ours to choose, only that
    // it is an error that names the verb, or a batch that never completes well.
    let mut fresh = End::new(&b.port);
    fresh.init();
    let mut batch = SendBatch::new(4, 1);
    for wr_id in 0..4 {
        assert!(batch.push(request(wr_id, Operation::Write, 0, 0), &[]));
    }
    if let Err(error) = fresh.pair.post_send(&mut batch) {
        assert!(error.posted <= 4);
        assert_eq!(error.source.verb(), "ibv_post_send");
        assert!(error.source.errno().is_some_and(|errno| errno > 0));
    }
    assert!(batch.is_empty());
}

#[test]
fn a_full_send_queue_is_refused_with_what_was_taken() {
    let Some(ports) = two_ports() else { return };
    let [mut a, b] = connected(&ports);
    let target = b.memory(4096, ALL);
    let room = a.pair.capacity().send_requests as usize;
    // No receive is posted: the first immediate waits, and all others behind it. Providers round queues up.
    let mut batch = SendBatch::new(4 * room, 1);
    while batch.push(
        request(
            9,
            Operation::WriteWithImmediate(0),
            target.address,
            target.region.rkey(),
        ),
        &[],
    ) {}
    let error = a.pair.post_send(&mut batch).unwrap_err();
    assert!((room..4 * room).contains(&error.posted), "{error:?}");
    assert_eq!(error.source.errno(), Some(libc::ENOMEM), "{error:?}");
    assert_eq!(Error::from(error.clone()).kind(), ErrorKind::ResourceExhausted);
    // Each that was taken reports, and no other.
    a.pair.to_error().unwrap();
    let ended = completions(&a.sends, error.posted);
    assert!(ended.iter().all(|one| one.status != Status::Success));
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(a.sends.poll(&mut CompletionBuffer::new(4)).unwrap(), 0);
}

#[test]
fn a_state_change_that_is_refused_is_explained() {
    let Some(ports) = two_ports() else { return };
    let mut end = End::new(&ports[0]);
    end.aim(&ports[1]);
    let step = end.receive_state(5, 6);
    let text = |error: kvxfer_rdma::verbs::VerbsError| {
        assert_eq!(
            (error.verb(), error.errno()),
            ("ibv_modify_qp", Some(libc::EINVAL)),
            "{error}"
        );
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        error.to_string()
    };
    let out_of_order = text(end.pair.to_receive(&step).unwrap_err());
    assert!(out_of_order.contains("it is in RESET, not in INIT"), "{out_of_order}");
    let init = InitState {
        port: 99,
        pkey_index: 0,
        remote_write: true,
        remote_read: false,
    };
    let no_port = text(end.pair.to_init(&init).unwrap_err());
    assert!(no_port.contains("port 99 is above"), "{no_port}");
    end.init();
    let active = end.port.attributes.active_mtu;
    if let Some(larger) = Mtu::ALL.into_iter().find(|mtu| *mtu > active) {
        let state = kvxfer_rdma::verbs::ReceiveState { mtu: larger, ..step };
        let mtu = text(end.pair.to_receive(&state).unwrap_err());
        assert!(
            mtu.contains(&format!("path MTU {larger} is above the port's active MTU {active}")),
            "{mtu}"
        );
    }
    let mut state = step;
    state.address.gid_index = 300;
    let index = end.pair.to_receive(&state).unwrap_err();
    assert_eq!(index.kind(), ErrorKind::Unsupported);
    end.pair.to_receive(&step).unwrap();
    assert_eq!(end.pair.state().unwrap(), QpState::ReadyToReceive);
}

#[test]
fn what_is_more_than_the_device_allows_is_named() {
    let Some(ports) = two_ports() else { return };
    let end = End::new(&ports[0]);
    let limits = end.port.context.attributes();
    let mut capacity = CAPACITY;
    capacity.send_segments = limits.max_sge + 1;
    let error = kvxfer_rdma::verbs::QueuePair::new(&end.domain, &end.sends, &end.receives, capacity).unwrap_err();
    assert!(
        error.to_string().contains(&format!(
            "send segments {} (at most {})",
            limits.max_sge + 1,
            limits.max_sge
        )),
        "{error}"
    );
    let error = kvxfer_rdma::verbs::CompletionQueue::new(&end.port.context, limits.max_cqe + 1, None).unwrap_err();
    assert!(
        error
            .to_string()
            .contains(&format!("the device allows {}", limits.max_cqe)),
        "{error}"
    );
    let error = end.port.context.port(99).unwrap_err();
    assert_eq!(error.verb(), "ibv_query_port");
    assert!(end.port.context.pkey(end.port.number, 0).unwrap() & 0x7fff != 0);
    assert_eq!(
        end.port.context.pkey(end.port.number, u16::MAX).unwrap_err().verb(),
        "ibv_query_pkey"
    );
}

#[test]
fn objects_outlive_their_makers_names() {
    let Some(ports) = two_ports() else { return };
    let name = ports[0].context.name().to_owned();
    let library = ports[0].context.library().clone();
    drop(ports);
    let context = Context::open(&library, &name).unwrap();
    drop(library);
    let end = End::new(&crate::ends::Port {
        number: 1,
        attributes: context.port(1).unwrap(),
        gids: context.gids(1).unwrap(),
        context,
    });
    let memory = end.memory(4096, ALL);
    // The queue pair is all that is left; it holds the rest.
    let End { pair, .. } = end;
    assert_eq!(pair.state().unwrap(), QpState::Reset);
    drop(memory);
    pair.destroy().unwrap();
}

#[test]
fn a_quiet_device_has_no_events() {
    let Some(ports) = two_ports() else { return };
    while let Some(event) = ports[0].context.next_async_event().unwrap() {
        assert!(!matches!(event.kind, AsyncEventKind::DeviceFatal), "{event:?}");
    }
}

//! A peer that says what no kvxfer says: the link has failed with `Protocol`, nothing panics, and other links go on.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

mod support;

use std::time::Duration;

use kvxfer_core::flow::{LaneName, PartExtent};
use kvxfer_core::transport::LinkEvent;
use kvxfer_core::{ErrorKind, Generation, SlotId};
use kvxfer_testkit::staged::StagedMemory;
use serde::Serialize;
use support::*;

/// The messages, as they are on the wire.
#[derive(Serialize, Clone)]
enum Said {
    Connect(Hello),
    Accept(Hello),
    Reject(LaneName, String),
    Ready(LaneName),
    Admit(SlotId, Generation),
    Admitted(SlotId, Generation),
    Refused(SlotId, Generation),
    Revoke(SlotId, Generation),
    Revoked(SlotId, Generation),
    Closing(Closing),
    Credits(LaneName, u32),
    Arrived(SlotId, Generation),
    UserMessage(SlotId, Generation, Vec<u8>),
    LandingWanted(LaneName, u32),
    Landings(LaneName, Vec<(u32, u64, u32)>),
    LandingsUnused(LaneName, Vec<u32>),
    Expose(LaneName, u32, Vec<(u64, u64, u32)>),
    Exposed(LaneName, (u32, u64, u32)),
    NotExposed(LaneName, u32, String),
    ExposureDone(LaneName, u32),
    LaneDown(LaneName, String),
}

#[derive(Serialize, Clone)]
struct Hello {
    lane: LaneName,
    own_port: u16,
    peer_port: u16,
    queue_pair: u32,
    packet_sequence: u32,
    lid: u16,
    gid: Option<[u8; 16]>,
    mtu_bytes: u32,
    reads_served: u8,
    reads_started: u8,
    receives: u32,
    probe_address: u64,
    probe_key: u32,
}

#[derive(Serialize, Clone)]
struct Closing {
    lane: LaneName,
    slot: SlotId,
    generation: Generation,
    close: u8,
    over_session: bool,
    has_message: bool,
    checksum: Option<u64>,
    chunks: Vec<(u32, PartExtent, u64, u32, Option<u32>)>,
}

const LANE: LaneName = LaneName { index: 0, epoch: 1 };

fn hello() -> Hello {
    Hello {
        lane: LaneName { index: 0, epoch: 5 },
        own_port: 0,
        peer_port: 0,
        queue_pair: 77,
        packet_sequence: 1,
        lid: 0,
        gid: None,
        mtu_bytes: 1024,
        reads_served: 1,
        reads_started: 1,
        receives: 8,
        probe_address: 4096,
        probe_key: 1,
    }
}

fn closing(slot: (SlotId, Generation), close: u8) -> Closing {
    Closing {
        lane: LANE,
        slot: slot.0,
        generation: slot.1,
        close,
        over_session: false,
        has_message: false,
        checksum: None,
        chunks: vec![(0, PartExtent::WHOLE, 0, 4096, None)],
    }
}

/// The version of the bodies.
const VERSION: u8 = 2;

fn body(said: &[Said]) -> Vec<u8> {
    let mut body = vec![VERSION];
    for one in said {
        body = postcard::to_extend(one, body).unwrap();
    }
    body
}

/// Says this to the right side (which accepts rails), or to the left one (which dials): the link fails with `Protocol`.
fn breaks(what: &str, to_left: bool, say: impl Fn((SlotId, Generation)) -> Vec<Vec<u8>>) {
    let site = Site::open();
    let pair = site.pair();
    let target = pair.right.memory(&[65_536]);
    let slot = pair.right.grant(range(0, 65_536), &target, None);
    pair.right_link.admit(slot.0, slot.1);
    let (link, log) = match to_left {
        true => (&pair.left_link, &pair.left_log),
        false => (&pair.right_link, &pair.right_log),
    };
    for body in say(slot) {
        link.message(body);
    }
    let error = log.wait(what, |event| match event {
        LinkEvent::Failed(error) => Some(error.clone()),
        _ => None,
    });
    assert_eq!(error.kind(), ErrorKind::Protocol, "{what}: {error}");
    log.closed();
    assert_eq!(log.count(|event| matches!(event, LinkEvent::Failed(_))), 1, "{what}");
    pair.right.slots.close(slot.0, slot.1);
    until("quiet", || to_left || pair.right.slots.fenced(slot.0, slot.1));
    if !to_left {
        assert!(
            pair.right.slots.fenced(slot.0, slot.1),
            "{what}: what was admitted is not quiet"
        );
    }
}

#[test]
fn bodies_that_are_none() {
    breaks("empty", false, |_| vec![vec![]]);
    breaks("another version", false, |_| vec![vec![VERSION + 1, 3, 0, 1]]);
    breaks("an unknown message", false, |_| vec![vec![VERSION, 99]]);
    breaks("cut off", false, |slot| {
        let whole = body(&[Said::Closing(closing(slot, 1))]);
        vec![whole[..whole.len() - 1].to_vec()]
    });
}

#[test]
fn rails_that_are_none() {
    let lane = LaneName { index: 400, epoch: 1 };
    breaks("credits of no rail", false, |_| vec![body(&[Said::Credits(lane, 1)])]);
    breaks("ready of no rail", true, |_| vec![body(&[Said::Ready(lane)])]);
    breaks("the acceptor dials", true, |_| vec![body(&[Said::Connect(hello())])]);
}

#[test]
fn closes_that_are_none() {
    breaks("the same close twice", false, |slot| {
        vec![body(&[
            Said::Closing(closing(slot, 3)),
            Said::Closing(closing(slot, 3)),
        ])]
    });
    breaks("more closes than credits", false, |slot| {
        let many = |from: u32| (from..from + 500).map(move |number| (SlotId(slot.0.0 + number / 256), number as u8));
        let say = |from| {
            let said: Vec<Said> = many(from)
                .map(|(id, close)| Said::Closing(closing((id, slot.1), close)))
                .collect();
            body(&said)
        };
        (0..10).map(|round| say(round * 500)).collect()
    });
    breaks("outside of the slot", false, |slot| {
        let mut outside = closing(slot, 1);
        outside.over_session = true;
        outside.chunks = vec![(0, PartExtent::WHOLE, 65_000, 4096, None)];
        vec![body(&[Said::Closing(outside)])]
    });
    breaks("too many chunks", false, |slot| {
        let mut long = closing(slot, 1);
        long.chunks = vec![(0, PartExtent::WHOLE, 0, 1, None); 65];
        vec![body(&[Said::Closing(long)])]
    });
    breaks("a chunk of 4 GiB", false, |slot| {
        let mut long = closing(slot, 1);
        long.chunks = vec![(0, PartExtent::WHOLE, 0, u32::MAX, None)];
        vec![body(&[Said::Closing(long)])]
    });
}

#[test]
fn landings_that_are_none() {
    breaks("a landing that it was not given", false, |slot| {
        let mut landed = closing(slot, 1);
        landed.over_session = true;
        landed.chunks = vec![(0, PartExtent::WHOLE, 0, 4096, Some(7))];
        vec![body(&[Said::Closing(landed)])]
    });
    breaks("the same landing twice", false, |slot| {
        let mut landed = closing(slot, 1);
        landed.over_session = true;
        landed.chunks = vec![
            (0, PartExtent::WHOLE, 0, 4096, Some(0)),
            (0, PartExtent::WHOLE, 4096, 4096, Some(0)),
        ];
        vec![body(&[Said::LandingWanted(LANE, 1), Said::Closing(landed)])]
    });
    breaks("more than it could use", false, |_| {
        let wanted = Said::LandingWanted(LANE, 4000);
        vec![body(&[wanted.clone(), wanted])]
    });
    breaks("more than can be asked for at once", false, |_| {
        vec![body(&[Said::LandingWanted(LANE, 5000)])]
    });
}

/// What goes through staging is not said to be in place: nobody can have written it there.
#[test]
fn a_close_without_a_landing_of_what_goes_through_staging() {
    let site = Site::open();
    let pair = site.pair();
    let domain = StagedMemory::new(Duration::ZERO, 1).unwrap();
    let target = pair.right.memory_of(vec![domain.allocate(65_536).unwrap()]);
    let arrival = std::sync::Arc::new(Arrival::default());
    let slot = pair.right.grant(range(0, 4096), &target, Some(arrival.clone()));
    pair.right_link.admit(slot.0, slot.1);
    let mut close = closing(slot, 1);
    close.over_session = true;
    pair.right_link.message(body(&[Said::Closing(close)]));
    let error = pair.right_log.wait("the link's end", |event| match event {
        LinkEvent::Failed(error) => Some(error.clone()),
        _ => None,
    });
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert!(arrival.wait(Duration::ZERO).is_none());
}

/// A peer that asks for landings and never uses them has no more than its share, and they come back with its rail.
#[test]
fn landings_that_nobody_uses() {
    let site = Site::open();
    let pair = site.pair_with(|config| config.staging_bytes_max = 16 * MIB);
    pair.right_link.message(body(&[Said::LandingWanted(LANE, 4000)]));
    until("landings", || pair.right.counter("staging_buffers_in_use") > 0);
    std::thread::sleep(Duration::from_millis(50));
    assert!(pair.right.counter("staging_buffers_in_use") <= 8);
    pair.close();
    pair.right_log.closed();
    assert_eq!(pair.right.counter("staging_buffers_in_use"), 0);
}

#[test]
fn exposures_that_are_none() {
    let ask = |number, pieces| Said::Expose(LANE, number, pieces);
    breaks("the same exposure twice", false, |_| {
        vec![body(&[ask(1, vec![(1, 0, 10)]), ask(1, vec![(1, 0, 10)])])]
    });
    breaks("more than a chunk", false, |_| {
        vec![body(&[ask(1, vec![(1, 0, 1 << 20), (1, 0, 1)])])]
    });
    breaks("nothing", false, |_| vec![body(&[ask(1, vec![])])]);
    breaks("more pieces than fit", false, |_| {
        vec![body(&[ask(1, vec![(1, 0, 1); 5000])])]
    });
    breaks("more at once than a lane has", false, |_| {
        let many: Vec<Said> = (0..300).map(|number| ask(number, vec![(1, 0, 10)])).collect();
        vec![body(&many)]
    });
}

#[test]
fn it_stops_what_it_was_not_told_to_stop() {
    breaks("revoked unasked", false, |slot| {
        vec![body(&[Said::Revoked(slot.0, slot.1)])]
    });
}

/// Things that are out of place, but harmless: late, unknown, or of another time.
#[test]
fn what_comes_late_is_ignored() {
    let site = Site::open();
    let pair = site.pair();
    let (memory, target) = (pair.left.memory(&[65_536]), pair.right.memory(&[65_536]));
    memory.fill(0, 1);
    let old = LaneName { index: 0, epoch: 0 };
    let far = LaneName { index: 3, epoch: 9 };
    let nothing = (SlotId(4000), Generation(9));
    for link in [&pair.left_link, &pair.right_link] {
        for lane in [old, far] {
            link.message(body(&[
                Said::Ready(lane),
                Said::Credits(lane, u32::MAX),
                Said::LaneDown(lane, "an old one".into()),
                Said::LandingWanted(lane, 4000),
                Said::Landings(lane, vec![(0, 4096, 1)]),
                Said::LandingsUnused(lane, vec![0, 1]),
                Said::Expose(lane, 1, vec![(1, 0, 10)]),
                Said::Exposed(lane, (1, 4096, 1)),
                Said::NotExposed(lane, 1, "no".into()),
                Said::ExposureDone(lane, 1),
                Said::Reject(lane, "an old one".into()),
            ]));
            let mut close = closing(nothing, 1);
            close.lane = lane;
            link.message(body(&[Said::Closing(close)]));
        }
        link.message(body(&[
            Said::Credits(LANE, u32::MAX),
            Said::Credits(LANE, u32::MAX),
            Said::Landings(LANE, vec![(0, 4096, 1)]),
            Said::LandingsUnused(LANE, vec![0, 1, u32::MAX]),
            // Regions that are not there, or that it has not all of.
            Said::Expose(LANE, 1, vec![(1 << 40, 0, 10)]),
            Said::Expose(LANE, 2, vec![(1, 1 << 40, 10), (2, u64::MAX, 10)]),
            Said::Exposed(LANE, (7, 4096, 1)),
            Said::NotExposed(LANE, 7, "no".into()),
            Said::ExposureDone(LANE, 7),
            Said::Admit(nothing.0, nothing.1),
            Said::Admitted(nothing.0, nothing.1),
            Said::Refused(nothing.0, nothing.1),
            Said::Revoke(nothing.0, nothing.1),
            Said::Revoked(nothing.0, nothing.1),
            Said::Arrived(nothing.0, nothing.1),
            Said::UserMessage(nothing.0, nothing.1, vec![1; 10]),
        ]));
        let mut strange = hello();
        strange.mtu_bytes = 0;
        link.message(body(&[Said::Accept(strange)]));
    }
    let stream = range(0, 65_536);
    pair.carry(&memory, &stream, &target, &stream);
    assert_eq!(pair.left_log.lost().len() + pair.right_log.lost().len(), 0);
}

/// A dialer whose queue pair is nonsense: the rail fails, and the next one works.
#[test]
fn a_strange_dialer() {
    let site = Site::open();
    let (left, right) = site.nodes(1, |config| config.connect_timeout = Duration::from_millis(300));
    let pair = Pair::new(left, right).up();
    for change in [
        (|hello: &mut Hello| hello.mtu_bytes = 777) as fn(&mut Hello),
        |hello| hello.own_port = 9,
        |hello| hello.gid = Some([9; 16]),
        |hello| hello.queue_pair = 0,
        |hello| hello.peer_port = 900,
        |hello| hello.lane.index = 900,
        |hello| hello.reads_served = 0,
    ] {
        let mut strange = hello();
        strange.lane.epoch = 1000;
        change(&mut strange);
        pair.right_link.message(body(&[Said::Connect(strange)]));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(pair.right_log.count(|event| matches!(event, LinkEvent::Closed)), 0);
    pair.right_link.close();
    pair.left_link.close();
    pair.right_log.closed();
    pair.left_log.closed();
}

/// Bytes without sense, many of them.
#[test]
fn noise() {
    let site = Site::open();
    let (left, right) = site.nodes(1, |_| {});
    let pair = Pair::new(left, right).up();
    for seed in 0..2000u64 {
        let length = pattern(seed, 1)[0] as usize % 120;
        let mut noise = pattern(seed + 1, length);
        noise.insert(0, VERSION);
        if seed % 3 == 0 && length > 1 {
            noise[1] %= 21;
        }
        pair.right_link.message(noise.clone());
        pair.left_link.message(noise);
    }
    pair.left_link.close();
    pair.right_link.close();
    pair.left_log.closed();
    pair.right_log.closed();
}

//! Transfers of many sizes and shapes arrive byte for byte, and nothing else changes.
// Helpers of tests unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;
use std::time::Duration;

use kvxfer_core::flow::{ByteStream, SendEvent, SendPart};
use kvxfer_core::memory::{Region, Segment};
use kvxfer_core::transport::LinkEvent;
use kvxfer_tcp::TcpConfig;
use kvxfer_testkit::rng::Rng;
use proptest::prelude::*;
use support::*;

in_every_world!(
    sizes_and_shapes,
    random_segments_over_several_regions,
    many_transfers_both_ways_at_once,
    messages_come_with_the_arrival,
    parts_stream_in_any_order,
    checksums_agree,
);

/// Pushes one stream and checks destination and surroundings.
fn push_and_check(
    pair: &Pair,
    id: u64,
    source: (&Arc<[Arc<Region>]>, Arc<dyn ByteStream>),
    destination: (&Arc<[Arc<Region>]>, Arc<dyn ByteStream>),
    make: impl FnOnce(Push) -> Push,
) -> Option<Arc<[u8]>> {
    let bytes = pattern(id + 1, source.1.length() as usize);
    write_stream(source.0, &*source.1, &bytes);
    let mut expected: Vec<Vec<u8>> = destination.0.iter().map(|region| poison(region)).collect();
    lay(&mut expected, &*destination.1, &bytes);
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(destination.1, destination.0, Some(arrival.clone()));
    let Sent { id, .. } = make(Push::new(id, slot, source.0, source.1)).submit(&pair.left_link);
    let message = arrival.wait(PATIENCE).unwrap_or_else(|| {
        let progress = pair.right.slots.progress(slot.0, slot.1);
        let lost = (pair.left_log.lost(), pair.right_log.lost());
        panic!("no arrival: {progress:?} {lost:?}")
    });
    pair.left_log.arrived(id);
    pair.left_link.forget(id);
    for (region, expected) in destination.0.iter().zip(&expected) {
        let mut now = vec![0; region.length() as usize];
        region.copy_out(0, &mut now).unwrap();
        assert!(now == *expected, "the destination is not what it should be");
    }
    assert!(pair.right.slots.release(slot.0, slot.1));
    message
}

fn poison(region: &Region) -> Vec<u8> {
    let bytes = pattern(region.length() ^ 0xdead, region.length() as usize);
    region.copy_in(0, &bytes).unwrap();
    bytes
}

fn lay(regions: &mut [Vec<u8>], stream: &dyn ByteStream, bytes: &[u8]) {
    let mut segments = Vec::new();
    stream.segments(0, stream.length(), usize::MAX, &mut segments);
    let mut at = 0;
    for segment in segments {
        let (start, length) = (segment.offset as usize, segment.length as usize);
        regions[segment.region as usize][start..start + length].copy_from_slice(&bytes[at..at + length]);
        at += length;
    }
}

fn sizes_and_shapes(world: &World) {
    let pair = world.pair(TcpConfig::default());
    let pool = 4 << 20;
    let (source, destination) = (world.regions(pool), world.regions(pool));
    let shapes = [
        (1, 1),
        (1, 4096),
        (7, 13),
        (3000, 64),
        (1500, 1000),
        (255, 8192),
        (16, 65_536),
        (1, (1 << 20) - 1),
        (1, 1 << 20),
        (1, (1 << 20) + 1),
        (1, 2_500_001),
    ];
    for (id, (count, length)) in shapes.into_iter().enumerate() {
        let from = random_pieces(id as u64 * 2 + 1, pool, count, length);
        let to = random_pieces(id as u64 * 2 + 2, pool, count, length);
        push_and_check(
            &pair,
            id as u64,
            (&source, Arc::new(from)),
            (&destination, Arc::new(to)),
            |push| push,
        );
    }
    // Nothing at all arrives too.
    let nothing = || {
        Arc::new(Pieces {
            region: 0,
            offsets: vec![],
            length: 1,
        })
    };
    push_and_check(&pair, 1000, (&source, nothing()), (&destination, nothing()), |push| {
        push
    });
    assert_eq!(pair.left_log.lost().len() + pair.right_log.lost().len(), 0);
}

fn random_segments_over_several_regions(world: &World) {
    let pair = world.pair(TcpConfig {
        call_bytes_max: 50_000,
        ..TcpConfig::default()
    });
    let mut rng = Rng::new(11);
    for id in 0..12 {
        let regions =
            |sizes: [u64; 3]| -> Arc<[Arc<Region>]> { sizes.iter().map(|size| world.region(*size)).collect() };
        let source = regions([700_000, 300_000, 1]);
        let destination = regions([1_000_000, 5000, 400_000]);
        let total = 1 + rng.below(900_000);
        let from = Scattered(cut(&mut rng, &source, total));
        let to = Scattered(cut(&mut rng, &destination, total));
        push_and_check(
            &pair,
            id,
            (&source, Arc::new(from)),
            (&destination, Arc::new(to)),
            |push| push,
        );
    }
}

/// Disjoint random segments of `total` bytes.
fn cut(rng: &mut Rng, regions: &[Arc<Region>], total: u64) -> Vec<Segment> {
    let mut all = Vec::new();
    for (index, region) in regions.iter().enumerate() {
        let mut at = 0;
        while at < region.length() {
            let longest = if rng.percent(20) { 60_000 } else { 700 };
            let length = (1 + rng.below(longest)).min(region.length() - at);
            all.push(Segment {
                region: index as u32,
                offset: at,
                length,
            });
            at += length;
        }
    }
    rng.shuffle(&mut all);
    let mut left = total;
    for segment in &mut all {
        segment.length = segment.length.min(left);
        left -= segment.length;
    }
    assert_eq!(left, 0, "the regions are large enough");
    all.retain(|segment| segment.length > 0);
    all
}

fn many_transfers_both_ways_at_once(world: &World) {
    let pair = world.pair(TcpConfig::default());
    let (count, length) = (60, 30_000);
    let pool = 4 << 20;
    let regions = [
        world.regions(pool),
        world.regions(pool),
        world.regions(pool),
        world.regions(pool),
    ];
    let mut waiting = Vec::new();
    for way in 0..2 {
        let (source, destination) = (&regions[way], &regions[way + 2]);
        let from = random_pieces(5 + way as u64, pool, count, length);
        let to = random_pieces(9 + way as u64, pool, count, length);
        for index in 0..count {
            let piece = |pieces: &Pieces| {
                Arc::new(Pieces {
                    region: 0,
                    offsets: vec![pieces.offsets[index]],
                    length,
                })
            };
            let (from, to) = (piece(&from), piece(&to));
            let bytes = pattern((way * 1000 + index) as u64, length as usize);
            write_stream(source, &*from, &bytes);
            let (node, link) = if way == 0 {
                (&pair.right, &pair.left_link)
            } else {
                (&pair.left, &pair.right_link)
            };
            let arrival = Arc::new(Arrival::default());
            let slot = node.grant(to.clone(), destination, Some(arrival.clone()));
            let Sent { id, .. } = Push::new(index as u64, slot, source, from).submit(link);
            waiting.push((way, id, arrival, to, bytes));
        }
    }
    for (way, id, arrival, to, bytes) in waiting {
        arrival.wait(PATIENCE).expect("the arrival");
        assert_eq!(arrival.times.load(std::sync::atomic::Ordering::SeqCst), 1);
        assert!(read_stream(&regions[way + 2], &*to) == bytes);
        if way == 0 { &pair.left_log } else { &pair.right_log }.arrived(id);
    }
}

fn messages_come_with_the_arrival(world: &World) {
    let pair = world.pair(TcpConfig::default());
    let pool = 1 << 20;
    let (source, destination) = (world.regions(pool), world.regions(pool));
    for (id, size) in [0, 1, 200, 9000, 65_536].into_iter().enumerate() {
        let message = pattern(size as u64, size);
        let piece = || Arc::new(random_pieces(3, pool, 1, 4096));
        let got = push_and_check(&pair, id as u64, (&source, piece()), (&destination, piece()), |push| {
            push.message(&message)
        });
        assert_eq!(got.as_deref(), Some(&message[..]));
    }
}

fn parts_stream_in_any_order(world: &World) {
    let pair = world.pair(TcpConfig::default());
    let pool = 2 << 20;
    let (source, destination) = (world.regions(pool), world.regions(pool));
    let from = Arc::new(random_pieces(1, pool, 100, 10_000));
    let to = Arc::new(random_pieces(2, pool, 100, 10_000));
    let bytes = pattern(77, from.bytes() as usize);
    write_stream(&source, &*from, &bytes);
    let arrival = Arc::new(Arrival::default());
    let slot = pair.right.grant(to.clone(), &destination, Some(arrival.clone()));
    let push = Push::new(1, slot, &source, from.clone());
    pair.left_link.submit(push.spec).unwrap();
    let cuts = [0u32, 1, 5000, 123_456, 123_457, 700_000, 1_000_000];
    for (part, order) in [3usize, 0, 5, 1, 4, 2].into_iter().enumerate() {
        let (start, end) = (cuts[order], cuts[order + 1]);
        let stream = Arc::new(Window {
            stream: from.clone(),
            start: u64::from(start),
            length: u64::from(end - start),
        });
        let extent = tokens(start, end);
        let part = SendPart {
            part: part as u32,
            extent,
            stream,
            remote: None,
        };
        assert!(
            arrival.wait(Duration::from_millis(5)).is_none(),
            "not before the last part"
        );
        pair.left_link.add_part(push.id, part);
    }
    arrival.wait(PATIENCE).expect("the arrival");
    assert!(read_stream(&destination, &*to) == bytes);
    pair.left_log.arrived(push.id);
}

fn checksums_agree(world: &World) {
    let pair = world.pair(TcpConfig::default());
    let pool = 4 << 20;
    let (source, destination) = (world.regions(pool), world.regions(pool));
    for (id, (count, length)) in [(1, 1), (100, 8192), (1, 3 << 20), (999, 777)].into_iter().enumerate() {
        let from = Arc::new(random_pieces(id as u64 + 50, pool, count, length));
        let to = Arc::new(random_pieces(id as u64 + 60, pool, count, length));
        push_and_check(&pair, id as u64, (&source, from), (&destination, to), |push| {
            push.checksum().message(b"checked too")
        });
    }
    assert_eq!(pair.right_log.lost().len(), 0);
}

#[test]
fn one_lane_and_many_lanes_on_several_threads() {
    for (lanes, data_threads) in [(1, 1), (5, 2), (8, 3)] {
        let pair = Pair::new(TcpConfig {
            lanes,
            data_threads,
            ..TcpConfig::default()
        })
        .up();
        let pool = 16 << 20;
        let (source, destination) = (host(pool), host(pool));
        let from = Arc::new(random_pieces(1, pool, 1000, 12_345));
        let to = Arc::new(random_pieces(2, pool, 1000, 12_345));
        push_and_check(&pair, 0, (&source, from), (&destination, to), |push| push);
        assert_eq!(pair.left_link.path().rails_configured, usize::from(lanes));
    }
}

#[test]
fn spinning_threads_move_the_same_bytes() {
    let pair = Pair::new(TcpConfig {
        spin: Duration::from_micros(200),
        ..TcpConfig::default()
    })
    .up();
    let (source, destination) = (host(1 << 20), host(1 << 20));
    for id in 0..20 {
        let piece = |seed| Arc::new(random_pieces(seed, 1 << 20, 3, 4096));
        push_and_check(
            &pair,
            id,
            (&source, piece(id + 1)),
            (&destination, piece(id + 99)),
            |push| push.message(b"x"),
        );
    }
}

/// Submitting threads and data threads contend for the lanes, in both directions: nobody is left waiting.
#[test]
fn small_transfers_from_many_threads_all_arrive() {
    for data_threads in [1, 2] {
        let pair = Pair::new(TcpConfig {
            data_threads,
            ..TcpConfig::default()
        })
        .up();
        let (source, destination) = (host(1 << 20), host(1 << 20));
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (pair, source, destination) = (&pair, &source, &destination);
                scope.spawn(move || {
                    let (node, link, log) = if thread % 2 == 0 {
                        (&pair.right, &pair.left_link, &pair.left_log)
                    } else {
                        (&pair.left, &pair.right_link, &pair.right_log)
                    };
                    for round in 0..300 {
                        let piece = || Arc::new(random_pieces(thread + 1, 1 << 20, 1, 4096));
                        let arrival = Arc::new(Arrival::default());
                        let slot = node.grant(piece(), destination, Some(arrival.clone()));
                        let push =
                            Push::new(thread * 1000 + round, slot, source, piece()).message(&round.to_le_bytes());
                        let Sent { id, .. } = push.submit(link);
                        let message = arrival.wait(PATIENCE).expect("the arrival");
                        assert_eq!(message.as_deref(), Some(&round.to_le_bytes()[..]));
                        if round % 50 == 0 {
                            log.arrived(id);
                        }
                    }
                });
            }
        });
    }
}

#[test]
fn counters_add_up() {
    let pair = Pair::new(TcpConfig::default()).up();
    let pool = 8 << 20;
    let (source, destination) = (host(pool), host(pool));
    let from = Arc::new(random_pieces(1, pool, 100, 40_000));
    let to = Arc::new(random_pieces(2, pool, 100, 40_000));
    push_and_check(&pair, 0, (&source, from), (&destination, to), |push| push);
    assert_eq!(pair.left.moved("sent"), 4_000_000);
    assert_eq!(pair.right.moved("received"), 4_000_000);
    assert_eq!(pair.left.moved("received") + pair.right.moved("sent"), 0);
}

#[test]
fn a_transfer_that_waits_for_its_lanes_goes_when_they_are_up() {
    let pair = Pair::new(TcpConfig::default());
    let (source, destination) = (host(1 << 20), host(1 << 20));
    let piece = || Arc::new(random_pieces(1, 1 << 20, 5, 4096));
    push_and_check(&pair, 0, (&source, piece()), (&destination, piece()), |push| push);
    pair.left_log.wait("drain", |event| {
        matches!(event, LinkEvent::Send(SendEvent::Arrived(_))).then_some(())
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_segments_arrive(seed in any::<u64>(), total in 1u64..1_500_000, staged in any::<bool>(), checksum in any::<bool>()) {
        let world = World::new(v4(), if staged { Kind::staged() } else { Kind::Host });
        let pair = world.pair(TcpConfig::default());
        let mut rng = Rng::new(seed);
        let source: Arc<[Arc<Region>]> = Arc::new([world.region(1_000_000), world.region(500_000)]);
        let destination: Arc<[Arc<Region>]> = Arc::new([world.region(1_500_000)]);
        let from = Arc::new(Scattered(cut(&mut rng, &source, total)));
        let to = Arc::new(Scattered(cut(&mut rng, &destination, total)));
        push_and_check(&pair, 0, (&source, from), (&destination, to), |push| if checksum { push.checksum() } else { push });
    }
}

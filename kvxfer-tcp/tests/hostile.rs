//! Peers that break the protocol: a typed error, the lane closed, nothing written outside a live grant.
// Helpers of tests unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvxfer_core::flow::{CHUNK_BYTES_MAX, ChunkHeader, ChunkState, LaneName, MESSAGE_PART, PartExtent};
use kvxfer_core::memory::Region;
use kvxfer_core::transport::{Link, LinkEvent, LinkPeer, Transport};
use kvxfer_core::wire::lane::{HEADER_BYTES, HELLO_BYTES, LaneHeader, LaneHello, Trailer};
use kvxfer_core::wire::reference::Run;
use kvxfer_core::{ErrorKind, Generation, Incarnation, SlotId};
use kvxfer_tcp::TcpConfig;
use kvxfer_testkit::rng::Rng;
use kvxfer_testkit::staged::StagedMemory;
use proptest::prelude::*;
use support::*;

in_every_world!(
    forged_headers_close_the_lane_and_write_nothing,
    random_bytes_close_the_lane_and_write_nothing,
    refused_chunks_leave_the_lane_clean,
    forged_references_write_nothing,
);

const THEM: Incarnation = Incarnation::from_bits(0xbad);

/// A node with a link to a peer that the test plays itself.
struct Victim {
    node: Node,
    link: Arc<dyn Link>,
    log: Arc<Log>,
    epoch: u32,
}

impl Victim {
    fn new(world: &World) -> Victim {
        let node = Node::new(0xb, TcpConfig::default(), world.ip);
        let log = Arc::new(Log::default());
        let peer = LinkPeer {
            incarnation: THEM,
            local: node.incarnation,
            addresses: vec![],
            advert: vec![],
            token: TOKEN,
            dials: false,
        };
        let link = node.transport.connect(peer, log.clone()).unwrap();
        Victim {
            node,
            link,
            log,
            epoch: 0,
        }
    }

    fn hello(&self, epoch: u32) -> LaneHello {
        LaneHello {
            from: THEM,
            to: self.node.incarnation,
            token: TOKEN,
            lane: LaneName { index: 0, epoch },
        }
    }

    /// A lane that has exchanged hellos.
    fn lane(&mut self) -> TcpStream {
        self.epoch += 1;
        let mut stream = TcpStream::connect(self.node.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        stream.write_all(&self.hello(self.epoch).encode()).unwrap();
        let mut answer = [0; HELLO_BYTES];
        stream.read_exact(&mut answer).unwrap();
        let answer = LaneHello::decode(&answer).unwrap();
        assert_eq!((answer.from, answer.to), (self.node.incarnation, THEM));
        assert_eq!(answer.lane.epoch, self.epoch);
        stream
    }

    /// Waits for the loss of the present lane.
    fn lost(&self) -> kvxfer_core::Error {
        self.log.wait("loss", |event| match event {
            LinkEvent::LaneLost { lane, error, .. } if lane.epoch == self.epoch => Some(error.clone()),
            _ => None,
        })
    }
}

fn closed(stream: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

fn header(slot: SlotId, generation: Generation) -> ChunkHeader {
    ChunkHeader {
        slot,
        generation,
        part: 0,
        extent: PartExtent::WHOLE,
        offset: 0,
        length: 1000,
        has_message: false,
        checksummed: false,
    }
}

fn grant(world: &World, victim: &Victim) -> (Arc<[Arc<Region>]>, Vec<u8>, SlotId, Generation) {
    let regions = world.regions(100_000);
    let before = pattern(9, 100_000);
    regions[0].copy_in(0, &before).unwrap();
    let stream = Arc::new(Pieces {
        region: 0,
        offsets: vec![10_000, 50_000],
        length: 5_000,
    });
    let (slot, generation) = victim.node.grant(stream, &regions, None);
    (regions, before, slot, generation)
}

fn read(regions: &[Arc<Region>]) -> Vec<u8> {
    let mut bytes = vec![0; 100_000];
    regions[0].copy_out(0, &mut bytes).unwrap();
    bytes
}

fn forged_headers_close_the_lane_and_write_nothing(world: &World) {
    let mut victim = Victim::new(world);
    let (regions, before, slot, generation) = grant(world, &victim);
    let good = header(slot, generation);
    let forged = [
        ("beyond the stream", ChunkHeader { offset: 9_500, ..good }),
        (
            "an offset that overflows",
            ChunkHeader {
                offset: u64::MAX - 10,
                ..good
            },
        ),
        (
            "longer than a chunk",
            ChunkHeader {
                length: CHUNK_BYTES_MAX + 1,
                ..good
            },
        ),
        (
            "as long as can be",
            ChunkHeader {
                length: u32::MAX,
                ..good
            },
        ),
        (
            "a message that was not announced",
            ChunkHeader {
                part: MESSAGE_PART,
                ..good
            },
        ),
        (
            "a message too long",
            ChunkHeader {
                part: MESSAGE_PART,
                has_message: true,
                length: 1 << 20,
                extent: PartExtent {
                    token_end: 1 << 20,
                    ..PartExtent::WHOLE
                },
                ..good
            },
        ),
    ];
    for (what, header) in forged {
        let mut stream = victim.lane();
        stream.write_all(&LaneHeader::Chunk(header).encode()).unwrap();
        let _ = stream.write_all(&vec![0x66; 70_000]);
        let error = victim.lost();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{what}: {error}");
        assert!(error.to_string().contains("lane 0."), "{error}");
        assert!(closed(&mut stream), "{what}");
    }
    // A bit that flipped in a header.
    let mut bytes = LaneHeader::Chunk(good).encode();
    bytes[20] ^= 1;
    let mut stream = victim.lane();
    stream.write_all(&bytes).unwrap();
    assert_eq!(victim.lost().kind(), ErrorKind::Corrupt);
    // A trailer that is none. The payload was placed in the grant, and does not count.
    let mut stream2 = victim.lane();
    stream2.write_all(&LaneHeader::Chunk(good).encode()).unwrap();
    stream2.write_all(&before[10_000..11_000]).unwrap();
    stream2.write_all(&[0xff; 16]).unwrap();
    assert!(matches!(victim.lost().kind(), ErrorKind::Protocol | ErrorKind::Corrupt));
    assert!(closed(&mut stream) && closed(&mut stream2));
    // A header that never ends, and a payload that never ends.
    for sent in [
        &LaneHeader::Chunk(good).encode()[..30],
        &LaneHeader::Chunk(good).encode()[..],
    ] {
        let mut stream = victim.lane();
        stream.write_all(sent).unwrap();
        drop(stream);
        assert_eq!(victim.lost().kind(), ErrorKind::Transport);
    }

    assert!(read(&regions) == before, "something was written");
    let progress = victim.node.slots.progress(slot, generation).unwrap();
    assert_eq!((progress.applied_bytes, progress.arrived), (0, false));
    assert_live(world, victim);
}

fn random_bytes_close_the_lane_and_write_nothing(world: &World) {
    let mut victim = Victim::new(world);
    let (regions, before, ..) = grant(world, &victim);
    let mut rng = Rng::new(5);
    for round in 0..8 {
        let mut stream = victim.lane();
        let length = 1 + rng.below(200_000) as usize;
        let _ = stream.write_all(&pattern(round + 100, length));
        if length < HEADER_BYTES {
            drop(stream);
            victim.lost();
            continue;
        }
        assert!(matches!(
            victim.lost().kind(),
            ErrorKind::Protocol | ErrorKind::Corrupt | ErrorKind::Transport
        ));
        assert!(closed(&mut stream));
    }
    assert!(read(&regions) == before);
    assert_live(world, victim);
}

/// Slots that are gone, other generations, chunks twice, acknowledgements of nothing: answered, not fatal.
fn refused_chunks_leave_the_lane_clean(world: &World) {
    let mut victim = Victim::new(world);
    let (regions, mut expected, slot, generation) = grant(world, &victim);
    let mut stream = victim.lane();
    let good = header(slot, generation);
    let later = Generation(generation.0 + 1);
    let cases = [
        (header(SlotId(4_000_000), Generation(1)), ChunkState::Refused, true),
        (header(slot, later), ChunkState::Refused, true),
        (good, ChunkState::Missing, false),
        (good, ChunkState::Applied, true),
        (good, ChunkState::Applied, true),
    ];
    // An acknowledgement of something that was never sent is ignored.
    stream
        .write_all(&LaneHeader::Ack(good.name(), ChunkState::Arrived).encode())
        .unwrap();
    for (index, (header, state, valid)) in cases.into_iter().enumerate() {
        let payload = pattern(index as u64 + 20, 1000);
        stream.write_all(&LaneHeader::Chunk(header).encode()).unwrap();
        stream.write_all(&payload).unwrap();
        stream.write_all(&Trailer { valid, checksum: 0 }.encode()).unwrap();
        let mut answer = [0; HEADER_BYTES];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(
            LaneHeader::decode(&answer).unwrap(),
            LaneHeader::Ack(header.name(), state),
            "case {index}"
        );
        if index == 3 {
            expected[10_000..11_000].copy_from_slice(&payload);
        }
    }
    assert!(read(&regions) == expected);
    assert_eq!(victim.log.lost().len(), 0);
    let progress = victim.node.slots.progress(slot, generation).unwrap();
    assert_eq!(progress.applied_bytes, 1000);
    assert_live(world, victim);
}

/// What is said of references that were never made closes the lane; references to memory that is not there, or to more of it
/// than there is, are declined.
fn forged_references_write_nothing(world: &World) {
    let mut victim = Victim::new(world);
    let (regions, before, slot, generation) = grant(world, &victim);
    let good = header(slot, generation);
    let reference = |runs: &[(u32, u32, u64)]| {
        let mut bytes = Vec::new();
        for &(export, length, offset) in runs {
            let run = Run { export, length, offset };
            run.encode(&mut bytes);
        }
        let header = LaneHeader::Reference {
            chunk: good,
            bytes: bytes.len() as u32,
        };
        [&header.encode()[..], &bytes].concat()
    };
    let fatal = [
        (
            "an answer that nobody asked for",
            LaneHeader::Validated(good.name(), true).encode().to_vec(),
        ),
        (
            "a question about nothing",
            LaneHeader::Validate(good.name()).encode().to_vec(),
        ),
        (
            "a refusal of nothing",
            LaneHeader::Declined(good.name()).encode().to_vec(),
        ),
        ("runs too short", reference(&[(1, 999, 0)])),
        ("runs too long", reference(&[(1, 999, 0), (1, 2, 0)])),
        ("a run of nothing", reference(&[(1, 1000, 0), (1, 0, 0)])),
        ("a run that wraps", reference(&[(1, 1000, u64::MAX - 10)])),
    ];
    for (what, bytes) in fatal {
        let mut stream = victim.lane();
        stream.write_all(&bytes).unwrap();
        let error = victim.lost();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{what}: {error}");
        assert!(closed(&mut stream), "{what}");
    }
    let mut stream = victim.lane();
    // More than is listened to, of exports that there are not; one that is said to be mapped, of what was not exported.
    for number in 0..9000 {
        let header = LaneHeader::Export { number, bytes: 8 };
        stream.write_all(&header.encode()).unwrap();
        stream.write_all(&pattern(u64::from(number), 8)).unwrap();
    }
    stream.write_all(&LaneHeader::Imported { number: 7 }.encode()).unwrap();
    for runs in [[(1, 1000, 0)], [(8999, 1000, 5)], [(7, 1000, 1 << 50)]] {
        stream.write_all(&reference(&runs)).unwrap();
        let mut answer = [0; HEADER_BYTES];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(LaneHeader::decode(&answer).unwrap(), LaneHeader::Declined(good.name()));
    }
    assert!(read(&regions) == before, "something was written");
    let progress = victim.node.slots.progress(slot, generation).unwrap();
    assert_eq!((progress.applied_bytes, progress.arrived), (0, false));
    assert_live(world, victim);
}

/// Whoever refers and never answers is not remembered without a bound.
#[test]
fn references_that_are_never_settled_are_bounded() {
    let (theirs, ours) = [1, 2]
        .map(|seed| StagedMemory::new(Duration::ZERO, seed).unwrap())
        .into();
    theirs.sharing().allow(Duration::ZERO);
    ours.sharing().allow(Duration::ZERO);
    let world = World::new(v4(), Kind::Staged(ours));
    let mut victim = Victim::new(&world);
    let (_regions, _, slot, generation) = grant(&world, &victim);
    let one = move |offset: u64| ChunkHeader {
        offset,
        length: 1,
        ..header(slot, generation)
    };
    let region = theirs.allocate(1 << 20).unwrap();
    let exported = region.domain().export(&region).unwrap().unwrap();
    let mut stream = victim.lane();
    let description = exported.description();
    let bytes = description.len() as u32;
    stream
        .write_all(&LaneHeader::Export { number: 1, bytes }.encode())
        .unwrap();
    stream.write_all(description).unwrap();
    // Chunks as bytes, until it is mapped.
    let trailer = Trailer {
        valid: true,
        checksum: 0,
    };
    let mut offset = 0;
    loop {
        stream.write_all(&LaneHeader::Chunk(one(offset)).encode()).unwrap();
        stream.write_all(&[7]).unwrap();
        stream.write_all(&trailer.encode()).unwrap();
        offset += 1;
        let mut answer = [0; HEADER_BYTES];
        stream.read_exact(&mut answer).unwrap();
        if LaneHeader::decode(&answer).unwrap() == (LaneHeader::Imported { number: 1 }) {
            break;
        }
    }
    let mut run = Vec::new();
    Run {
        export: 1,
        length: 1,
        offset: 0,
    }
    .encode(&mut run);
    // Each is followed, and asked about; nobody answers.
    let mut refer = stream.try_clone().unwrap();
    let referring = std::thread::spawn(move || {
        for offset in offset..5_000 {
            let reference = LaneHeader::Reference {
                chunk: one(offset),
                bytes: run.len() as u32,
            };
            if refer.write_all(&[&reference.encode()[..], &run].concat()).is_err() {
                return;
            }
        }
    });
    assert!(closed(&mut stream));
    let error = victim.lost();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert!(error.to_string().contains("chunks at once"), "{error}");
    referring.join().unwrap();
    assert_live(&world, victim);
}

/// The victim still works: a good chunk arrives.
fn assert_live(world: &World, mut victim: Victim) {
    let regions = world.regions(4096);
    let whole = || {
        Arc::new(Scattered(vec![kvxfer_core::memory::Segment {
            region: 0,
            offset: 96,
            length: 1000,
        }]))
    };
    let (slot, generation) = victim.node.grant(whole(), &regions, None);
    let mut stream = victim.lane();
    let payload = pattern(77, 1000);
    stream
        .write_all(&LaneHeader::Chunk(header(slot, generation)).encode())
        .unwrap();
    stream.write_all(&payload).unwrap();
    stream
        .write_all(
            &Trailer {
                valid: true,
                checksum: 0,
            }
            .encode(),
        )
        .unwrap();
    victim.log.wait("arrival", |event| {
        matches!(event, LinkEvent::SlotArrived { slot: arrived, .. } if *arrived == slot).then_some(())
    });
    let mut placed = vec![0; 1000];
    regions[0].copy_out(96, &mut placed).unwrap();
    assert_eq!(placed, payload);
    victim.link.close();
    victim.log.closed();
}

#[test]
fn a_peer_that_sends_and_never_reads_is_held_up() {
    let world = World::new(v4(), Kind::Host);
    let mut victim = Victim::new(&world);
    let stream = victim.lane();
    stream.set_nonblocking(true).unwrap();
    // Empty chunks for a slot that is not there: 72 bytes each, 56 bytes of answer each.
    let chunk = ChunkHeader {
        length: 0,
        ..header(SlotId(0), Generation(7))
    };
    let mut bytes = Vec::new();
    for _ in 0..1000 {
        bytes.extend_from_slice(&LaneHeader::Chunk(chunk).encode());
        bytes.extend_from_slice(
            &Trailer {
                valid: true,
                checksum: 0,
            }
            .encode(),
        );
    }
    let (mut sent, mut still) = (0usize, Instant::now());
    while still.elapsed() < Duration::from_millis(300) {
        match (&stream).write(&bytes[sent % bytes.len()..]) {
            Ok(length) => {
                sent += length;
                still = Instant::now();
            }
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
        assert!(sent < 400 << 20, "it is never held up");
    }
    assert!(victim.log.lost().is_empty());
}

#[test]
fn hellos_of_strangers_are_refused() {
    for ip in [v4(), v6()] {
        let world = World::new(ip, Kind::Host);
        let mut victim = Victim::new(&world);
        let _lane = victim.lane();
        let adopt = |hello: LaneHello| {
            let _stream = TcpStream::connect(victim.node.address).unwrap();
            let listener = std::net::TcpListener::bind((ip, 0)).unwrap();
            let mut dialed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let accepted = listener.accept().unwrap().0;
            let result = victim.node.transport.adopt(accepted, hello);
            dialed.set_read_timeout(Some(Duration::from_secs(4))).unwrap();
            (result.map_err(|error| error.kind()), closed(&mut dialed))
        };
        let good = victim.hello(9);
        let unauthenticated = (Err(ErrorKind::Unauthenticated), true);
        let not_us = LaneHello {
            to: Incarnation::from_bits(1),
            ..good
        };
        assert_eq!(adopt(not_us), unauthenticated);
        let no_such_lane = LaneHello {
            lane: LaneName { index: 63, epoch: 9 },
            ..good
        };
        let lanes = usize::from(TcpConfig::default().lanes);
        assert!(lanes < 63);
        assert_eq!(adopt(no_such_lane), unauthenticated);
        assert_eq!(
            adopt(victim.hello(1)),
            unauthenticated,
            "an epoch that was there before"
        );
        // A token that no session has may belong to one that is being made: it waits, is not answered, and is closed.
        let (result, closed) = adopt(LaneHello { token: 1, ..good });
        assert_eq!((result, closed), (Ok(()), true));
        assert_eq!(victim.log.lost().len(), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn any_header_is_survived(
        slot in 0u32..3, generation in 0u32..3, part in prop_oneof![0u32..3, Just(MESSAGE_PART)],
        offset in prop_oneof![0u64..12_000, any::<u64>()], length in prop_oneof![0u32..12_000, any::<u32>()],
        has_message in any::<bool>(), checksummed in any::<bool>(),
        tokens in prop_oneof![Just((0u32, u32::MAX)), (0u32..12_000, 0u32..12_000), any::<(u32, u32)>()],
    ) {
        let world = World::new(v4(), Kind::Host);
        let mut victim = Victim::new(&world);
        let (regions, before, ..) = grant(&world, &victim);
        let mut stream = victim.lane();
        let extent = PartExtent { token_start: tokens.0, token_end: tokens.1, ..PartExtent::WHOLE };
        let header = ChunkHeader {
            slot: SlotId(slot), generation: Generation(generation), part, extent, offset, length, has_message, checksummed,
        };
        stream.write_all(&LaneHeader::Chunk(header).encode()).unwrap();
        let _ = stream.write_all(&vec![0x5a; length.min(20_000) as usize]);
        let _ = stream.write_all(&Trailer { valid: true, checksum: 1 }.encode());
        let _ = stream.shutdown(std::net::Shutdown::Write);
        victim.lost();
        let after = read(&regions);
        let inside = |at: usize| (10_000..15_000).contains(&at) || (50_000..55_000).contains(&at);
        for (at, (old, new)) in before.iter().zip(&after).enumerate() {
            prop_assert!(old == new || (inside(at) && *new == 0x5a), "byte {} was written", at);
        }
    }
}

//! The wire format: what is encoded is decoded as the same, and whatever else arrives is an error, never a panic.

mod wire_common;

use kvxfer_core::error::{Error, ErrorKind};
use kvxfer_core::flow::{ChunkHeader, MESSAGE_PART, PartExtent};
use kvxfer_core::memory::EXPORT_BYTES_MAX;
use kvxfer_core::wire::lane::{
    HEADER_BYTES, HELLO_BYTES, LaneHeader, LaneHello, PayloadChecksum, TRAILER_BYTES, Trailer,
};
use kvxfer_core::wire::reference::{REFERENCE_BYTES_MAX, RUN_BYTES};
use kvxfer_core::wire::{
    EndpointAddress, FRAME_BODY_BYTES_MAX, FRAME_HEADER_BYTES, Frame, Grant, Message, body_length, decode, encode,
    fuzzing, is_session, limits,
};
use kvxfer_core::{Generation, SlotId};
use proptest::prelude::*;
use proptest::strategy::ValueTree;

/// A frame read as a driver reads it: header, length, body.
fn read(bytes: &[u8]) -> Result<Frame, Error> {
    let Some((header, body)) = bytes.split_first_chunk::<FRAME_HEADER_BYTES>() else {
        return Err(Error::new(ErrorKind::Protocol, "short"));
    };
    let length = body_length(header)?;
    match body.get(..length) {
        Some(body) => decode(header, body),
        None => decode(header, body),
    }
}

/// One change to some bytes.
#[derive(Debug, Clone)]
enum Mutation {
    Flip(prop::sample::Index, u8),
    Truncate(prop::sample::Index),
    Extend(Vec<u8>),
    Splice(prop::sample::Index, Vec<u8>),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let any_index = any::<prop::sample::Index>;
    let some_bytes = || prop::collection::vec(any::<u8>(), 1..20);
    prop_oneof![
        4 => (any_index(), 1..=255u8).prop_map(|(at, bits)| Mutation::Flip(at, bits)),
        2 => any_index().prop_map(Mutation::Truncate),
        1 => some_bytes().prop_map(Mutation::Extend),
        2 => (any_index(), some_bytes()).prop_map(|(at, bytes)| Mutation::Splice(at, bytes)),
    ]
}

impl Mutation {
    fn apply(&self, bytes: &mut Vec<u8>) {
        match self {
            Mutation::Flip(at, bits) if !bytes.is_empty() => {
                let at = at.index(bytes.len());
                bytes[at] ^= bits;
            }
            Mutation::Truncate(at) if !bytes.is_empty() => bytes.truncate(at.index(bytes.len())),
            Mutation::Splice(at, new) => {
                let at = at.index(bytes.len() + 1);
                let end = (at + new.len()).min(bytes.len());
                bytes.splice(at..end, new.iter().copied());
            }
            Mutation::Extend(new) => bytes.extend(new),
            _ => {}
        }
    }
}

proptest! {
    #[test]
    fn frames_round_trip(frame in wire_common::frame()) {
        let bytes = encode(&frame).unwrap();
        prop_assert!(is_session([bytes[0], bytes[1], bytes[2], bytes[3]]));
        prop_assert_eq!(read(&bytes).unwrap(), frame);
    }

    #[test]
    fn a_changed_frame_is_an_error_or_the_same(frame in wire_common::frame(), mutation in mutation()) {
        let mut bytes = encode(&frame).unwrap();
        mutation.apply(&mut bytes);
        if let Ok(read) = read(&bytes) {
            prop_assert_eq!(read, frame);
        }
        // Behind the checksum the parsers are on their own.
        fuzzing::session_frame(&bytes);
    }

    #[test]
    fn lanes_round_trip(
        hello in wire_common::lane_hello(),
        header in wire_common::lane_header(),
        trailer in wire_common::trailer()
    ) {
        prop_assert_eq!(LaneHello::decode(&hello.encode()).unwrap(), hello);
        prop_assert_eq!(LaneHeader::decode(&header.encode()).unwrap(), header);
        prop_assert_eq!(Trailer::decode(&trailer.encode()).unwrap(), trailer);
    }

    #[test]
    fn a_changed_lane_header_is_an_error(
        hello in wire_common::lane_hello(),
        header in wire_common::lane_header(),
        at in any::<prop::sample::Index>(),
        bits in 1..=255u8
    ) {
        let mut bytes = hello.encode();
        bytes[at.index(HELLO_BYTES)] ^= bits;
        prop_assert!(LaneHello::decode(&bytes).is_err());
        fuzzing::lane_bytes(&bytes);
        let mut bytes = header.encode();
        bytes[at.index(HEADER_BYTES)] ^= bits;
        prop_assert!(LaneHeader::decode(&bytes).is_err());
        fuzzing::lane_bytes(&bytes);
    }

    #[test]
    fn addresses_round_trip(address in wire_common::address(), mutation in mutation()) {
        let (mut text, mut bytes) = (address.to_string().into_bytes(), address.to_bytes());
        prop_assert!(text.len() < 128 && bytes.len() < 128);
        prop_assert_eq!(&String::from_utf8(text.clone()).unwrap().parse::<EndpointAddress>().unwrap(), &address);
        prop_assert_eq!(&EndpointAddress::from_bytes(&bytes).unwrap(), &address);
        mutation.apply(&mut text);
        fuzzing::address(&text);
        mutation.apply(&mut bytes);
        fuzzing::address(&bytes);
    }

    #[test]
    fn grants_round_trip(grant in wire_common::grant(), mutation in mutation()) {
        let mut bytes = grant.to_bytes().unwrap();
        prop_assert_eq!(&Grant::from_bytes(&bytes).unwrap(), &grant);
        mutation.apply(&mut bytes);
        if let Ok(read) = Grant::from_bytes(&bytes) {
            prop_assert_eq!(read, grant);
        }
        fuzzing::grant_bytes(&bytes);
    }

    #[test]
    fn layouts_survive_changes(layout in prop::sample::select(wire_common::layouts()), mutation in mutation()) {
        let mut bytes = postcard::to_allocvec(&layout).unwrap();
        fuzzing::layout(&bytes);
        mutation.apply(&mut bytes);
        fuzzing::layout(&bytes);
    }

    #[test]
    fn random_bytes_are_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        fuzzing::session_frame(&bytes);
        fuzzing::lane_bytes(&bytes);
        fuzzing::address(&bytes);
        fuzzing::grant_bytes(&bytes);
        fuzzing::layout(&bytes);
    }
}

/// A frame of any kind with these flags and body, and a right checksum.
fn forged(kind: u8, flags: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; FRAME_HEADER_BYTES];
    bytes[..4].copy_from_slice(b"KVXS");
    bytes[4] = 1;
    bytes[6] = kind;
    bytes[7] = flags;
    bytes[8..12].copy_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend(body);
    let crc = crc_fast::crc32_iscsi(&bytes);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes
}

#[test]
fn an_unknown_kind_is_skipped_only_if_optional() {
    assert_eq!(read(&forged(200, 1, b"whatever")).unwrap(), Frame::Skipped);
    let error = read(&forged(200, 0, b"whatever")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(error.to_string().contains("kind 200"), "{error}");
    assert_eq!(
        read(&forged(4, 2, &[0])).unwrap_err().kind(),
        ErrorKind::Protocol,
        "unknown flag"
    );
    assert_eq!(encode(&Frame::Skipped).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_hello_may_grow_and_a_message_may_not() {
    let refuse = Frame::Refuse(Error::new(ErrorKind::Unsupported, "version 7"));
    let mut body = encode(&refuse).unwrap().split_off(FRAME_HEADER_BYTES);
    body.extend(b"fields of a later version");
    assert_eq!(read(&forged(2, 0, &body)).unwrap(), refuse);
    // A heartbeat's body is one byte.
    assert!(read(&forged(4, 0, &[0])).is_ok());
    assert_eq!(read(&forged(4, 0, &[0, 0])).unwrap_err().kind(), ErrorKind::Protocol);
}

#[test]
fn headers_are_refused_before_their_body_is_read() {
    let good = encode(&Frame::Message {
        sequence: 3,
        acknowledged: 9,
        message: Box::new(Message::Draining),
    })
    .unwrap();
    let header = |change: &dyn Fn(&mut [u8; FRAME_HEADER_BYTES])| {
        let mut header = *good.first_chunk().unwrap();
        change(&mut header);
        body_length(&header).map_err(|error| error.kind())
    };
    assert_eq!(header(&|_| ()), Ok(1));
    assert_eq!(header(&|header| header[0] = b'G'), Err(ErrorKind::Protocol));
    assert_eq!(header(&|header| header[4] = 2), Err(ErrorKind::Unsupported));
    let over = (FRAME_BODY_BYTES_MAX as u32 + 1).to_le_bytes();
    assert_eq!(
        header(&|header| header[8..12].copy_from_slice(&over)),
        Err(ErrorKind::Protocol)
    );
}

#[test]
fn only_heartbeats_have_no_number() {
    let message = |sequence, message| Frame::Message {
        sequence,
        acknowledged: 0,
        message: Box::new(message),
    };
    assert!(encode(&message(0, Message::Heartbeat)).is_ok());
    let error = encode(&message(0, Message::Draining)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let mut bytes = encode(&message(5, Message::Draining)).unwrap();
    bytes.truncate(FRAME_HEADER_BYTES + 1);
    assert_eq!(
        read(&forged(4, 0, &bytes[FRAME_HEADER_BYTES..])).unwrap_err().kind(),
        ErrorKind::Protocol
    );
}

#[test]
fn caps_are_refused_on_both_sides() {
    let lane = kvxfer_core::flow::LaneName { index: 0, epoch: 1 };
    let name = ChunkHeader {
        slot: SlotId(1),
        generation: Generation(1),
        part: 0,
        extent: PartExtent::WHOLE,
        offset: 0,
        length: 1,
        has_message: false,
        checksummed: false,
    }
    .name();
    let message = |count| Frame::Message {
        sequence: 1,
        acknowledged: 0,
        message: Box::new(Message::FenceLane {
            lane,
            chunks: vec![name; count],
        }),
    };
    assert!(encode(&message(limits::FENCE_CHUNKS_MAX)).is_ok());
    let error = encode(&message(limits::FENCE_CHUNKS_MAX + 1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("4097"), "{error}");
    // The same message from somebody who does not check.
    let Frame::Message { message, .. } = message(limits::FENCE_CHUNKS_MAX + 1) else {
        unreachable!()
    };
    let body = postcard::to_allocvec(&message).unwrap();
    let mut bytes = forged(4, 0, &body);
    bytes[16] = 1; // a number
    bytes[12..16].fill(0);
    let crc = crc_fast::crc32_iscsi(&bytes);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    let error = read(&bytes).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(error.to_string().contains("at most 4096"), "{error}");
}

/// Refused when it is written, and when somebody who does not check has written it.
#[allow(clippy::unwrap_used)] // A helper of tests is a test.
fn refused_on_both_sides(message: Message, why: &str) {
    let frame = Frame::Message {
        sequence: 1,
        acknowledged: 0,
        message: Box::new(message),
    };
    let error = encode(&frame).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(error.to_string().contains(why), "{error}");
    let Frame::Message { message, .. } = frame else {
        unreachable!()
    };
    let mut bytes = forged(4, 0, &postcard::to_allocvec(&message).unwrap());
    bytes[16] = 1; // a number
    bytes[12..16].fill(0);
    let crc = crc_fast::crc32_iscsi(&bytes);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    let error = read(&bytes).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert!(error.to_string().contains(why), "{error}");
}

#[test]
fn what_one_sided_links_say_has_caps() {
    let link = |transport: usize, body: usize| Message::Link {
        transport: "t".repeat(transport),
        body: vec![7; body],
    };
    let fits = Frame::Message {
        sequence: 1,
        acknowledged: 0,
        message: Box::new(link(limits::TRANSPORT_NAME_BYTES_MAX, limits::LINK_MESSAGE_BYTES_MAX)),
    };
    assert_eq!(read(&encode(&fits).unwrap()).unwrap(), fits);
    refused_on_both_sides(link(1, limits::LINK_MESSAGE_BYTES_MAX + 1), "at most 131072");
    refused_on_both_sides(link(limits::TRANSPORT_NAME_BYTES_MAX + 1, 1), "at most 32");
    let failed = |name: usize, why: usize| Message::TransportFailed {
        transport: "t".repeat(name),
        error: kvxfer_core::Error::new(ErrorKind::Transport, "the device").because("x".repeat(why)),
    };
    refused_on_both_sides(failed(limits::TRANSPORT_NAME_BYTES_MAX + 1, 1), "at most 32");
    refused_on_both_sides(failed(1, limits::ERROR_BYTES_MAX), "at most 16384");
    let ready = |part, groups: usize| Message::PartReady {
        claim: 1,
        attempt: 1,
        part,
        extent: PartExtent::WHOLE,
        source: Some(kvxfer_core::plan::Target::from(kvxfer_core::layout::Selection {
            groups: vec![Default::default(); groups],
        })),
    };
    refused_on_both_sides(ready(MESSAGE_PART, 1), "no part's number");
    refused_on_both_sides(ready(0, limits::GROUPS_MAX + 1), "at most 64");
    let layout = wire_common::layouts()[0].clone();
    let pool = |transports: usize, bytes: usize| {
        Message::PoolAdded(kvxfer_core::wire::PoolAdvert {
            id: kvxfer_core::PoolId(1),
            layout: layout.clone(),
            serves: true,
            receives: true,
            keys: vec![("t".to_string(), vec![0; bytes]); transports],
        })
    };
    refused_on_both_sides(pool(1, limits::POOL_KEYS_BYTES_MAX + 1), "at most 65536");
    refused_on_both_sides(pool(limits::TRANSPORTS_MAX + 1, 1), "at most 16");
}

#[test]
fn a_huge_count_allocates_nothing() {
    // A VerdictAck that claims 2^63 grants.
    let mut body = vec![22];
    body.extend([0xff; 9]);
    body.push(0x01);
    assert_eq!(read(&forged(4, 0, &body)).unwrap_err().kind(), ErrorKind::Protocol);
}

fn refused_reference(chunk: ChunkHeader, bytes: u32) -> bool {
    LaneHeader::decode(&LaneHeader::Reference { chunk, bytes }.encode()).is_err()
}

#[test]
fn bad_lane_headers_say_what_is_wrong() {
    let header = ChunkHeader {
        slot: SlotId(1),
        generation: Generation(1),
        part: MESSAGE_PART,
        extent: PartExtent::WHOLE,
        offset: 0,
        length: 4,
        has_message: true,
        checksummed: false,
    };
    let kind = |header| LaneHeader::decode(&LaneHeader::Chunk(header).encode()).map_err(|error| error.kind());
    assert_eq!(kind(header), Err(ErrorKind::Protocol), "no message has that extent");
    let part = ChunkHeader { part: 0, ..header };
    assert!(kind(part).is_ok());
    let long = ChunkHeader {
        length: (1 << 20) + 1,
        ..part
    };
    assert_eq!(kind(long), Err(ErrorKind::Protocol));
    let wraps = ChunkHeader {
        offset: u64::MAX,
        ..part
    };
    assert_eq!(kind(wraps), Err(ErrorKind::Protocol));
    let refused = |header: LaneHeader| LaneHeader::decode(&header.encode()).unwrap_err().kind() == ErrorKind::Protocol;
    for bytes in [0, EXPORT_BYTES_MAX as u32 + 1] {
        assert!(refused(LaneHeader::Export { number: 1, bytes }));
    }
    let run = RUN_BYTES as u32;
    assert!(!refused_reference(part, run));
    for bytes in [0, run - 1, REFERENCE_BYTES_MAX as u32 + run] {
        assert!(refused_reference(part, bytes));
    }
    assert!(refused_reference(header, run), "a message");
    let checksummed = ChunkHeader {
        checksummed: true,
        ..part
    };
    assert!(refused_reference(checksummed, run));
    let mut bytes = LaneHeader::Chunk(part).encode();
    bytes[20] ^= 1;
    assert_eq!(LaneHeader::decode(&bytes).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(
        LaneHeader::decode(&[0; HEADER_BYTES]).unwrap_err().kind(),
        ErrorKind::Protocol
    );
    assert_eq!(
        Trailer::decode(&[0; TRAILER_BYTES]).unwrap_err().kind(),
        ErrorKind::Protocol
    );
}

#[test]
fn a_grant_of_another_version_is_unsupported() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let grant = wire_common::grant().new_tree(&mut runner).unwrap().current();
    let mut bytes = grant.to_bytes().unwrap();
    bytes[4] = 9;
    let error = Grant::from_bytes(&bytes).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("version 1"), "{error}");
    assert_eq!(Grant::from_bytes(b"").unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn the_payload_checksum_is_crc64_nvme() {
    let mut checksum = PayloadChecksum::new();
    checksum.update(b"1234");
    checksum.update(b"56789");
    assert_eq!(checksum.value(), 0xae8b_1486_0a79_9888);
}

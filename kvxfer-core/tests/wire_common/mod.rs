//! What the wire tests share: one value of everything that crosses the wire, and strategies for any of them.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use kvxfer_core::error::{Error, ErrorKind};
use kvxfer_core::flow::{ChunkHeader, ChunkName, ChunkState, LaneName, MESSAGE_PART, PartExtent};
use kvxfer_core::layout::{Arrangement, BlockDescriptor, GroupSelection, HeadRange, Model, PoolLayout, Selection};
use kvxfer_core::memory::EXPORT_BYTES_MAX;
use kvxfer_core::plan::{Scope, Target};
use kvxfer_core::wire::lane::{LaneHeader, LaneHello, Trailer};
use kvxfer_core::wire::reference::{RUN_BYTES, RUNS_MAX};
use kvxfer_core::wire::{
    Access, AuthOffer, ClaimMessage, EndpointAddress, Frame, Grant, Hello, Message, PoolAdvert, RankCoordinates,
    Resume, Verdict,
};
use kvxfer_core::{Generation, GrantName, Incarnation, PoolId, SlotId};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

pub fn layouts() -> Vec<PoolLayout> {
    let llama = Model::preset("llama-3.1-8b").unwrap();
    vec![
        PoolLayout::opaque(4096, 64).unwrap(),
        llama.layout(1, 4, 16, 8, Arrangement::PER_LAYER_NHD).unwrap(),
        llama.layout(0, 1, 16, 8, Arrangement::BLOCK_MAJOR_NHD).unwrap(),
    ]
}

pub fn socket() -> impl Strategy<Value = SocketAddr> {
    prop_oneof![
        (any::<[u8; 4]>(), any::<u16>()).prop_map(|(ip, port)| SocketAddr::from((Ipv4Addr::from(ip), port))),
        (any::<[u16; 8]>(), any::<u16>(), prop_oneof![Just(0), any::<u32>()])
            .prop_map(|(ip, port, scope)| SocketAddrV6::new(Ipv6Addr::from(ip), port, 0, scope).into()),
    ]
}

pub fn rank() -> impl Strategy<Value = RankCoordinates> {
    let place = || (0..u16::MAX).prop_flat_map(|size| (0..=size, Just(size + 1)));
    prop_oneof![
        Just(RankCoordinates::default()),
        (place(), place()).prop_map(|(tensor, pipeline)| RankCoordinates { tensor, pipeline }),
    ]
}

pub fn address() -> impl Strategy<Value = EndpointAddress> {
    let known = (vec(socket(), 0..=2), any::<u128>(), rank()).prop_map(|(sockets, bits, rank)| EndpointAddress {
        sockets,
        incarnation: Some(Incarnation::from_bits(bits)),
        rank,
    });
    let bare = (vec(socket(), 1..=2), rank()).prop_map(|(sockets, rank)| EndpointAddress {
        sockets,
        incarnation: None,
        rank,
    });
    prop_oneof![4 => known, 1 => bare]
}

pub fn error() -> impl Strategy<Value = Error> {
    (prop::sample::select(ErrorKind::ALL), ".{0,40}", ".{0,40}", ".{0,40}")
        .prop_map(|(kind, what, place, why)| Error::new(kind, what).at(place).because(why).remedy("wait"))
}

pub fn verdict() -> impl Strategy<Value = Verdict> {
    prop_oneof![
        Just(Verdict::Arrived),
        Just(Verdict::Unknown),
        error().prop_map(Verdict::Failed)
    ]
}

pub fn extent() -> impl Strategy<Value = PartExtent> {
    (any::<(u32, u32)>(), any::<(u16, u16)>(), any::<bool>()).prop_map(|(tokens, layers, states)| PartExtent {
        token_start: tokens.0.min(tokens.1),
        token_end: tokens.0.max(tokens.1),
        layer_start: layers.0.min(layers.1),
        layer_end: layers.0.max(layers.1),
        states,
    })
}

pub fn target() -> impl Strategy<Value = Target> {
    let group = (any::<(u32, u32)>(), vec(any::<u32>(), 0..20)).prop_map(|(tokens, blocks)| GroupSelection {
        first_token: tokens.0.min(tokens.1),
        token_end: tokens.0.max(tokens.1),
        blocks,
    });
    let heads = vec(any::<(u32, u32)>(), 0..4).prop_map(|ranges| {
        let range = |(a, b): (u32, u32)| HeadRange {
            start: a.min(b),
            end: a.max(b),
        };
        ranges.into_iter().map(range).collect::<Vec<_>>()
    });
    let scope =
        (prop::collection::btree_set(any::<u16>(), 0..20), option::of(heads)).prop_map(|(layers, heads)| Scope {
            layers: layers.into_iter().collect(),
            heads,
        });
    let selection = (vec(group, 0..4), scope).prop_map(|(groups, scope)| Target::Selection {
        selection: Selection { groups },
        scope,
    });
    let descriptors = vec(any::<(u32, u32, u32, u32)>(), 0..20).prop_map(|list| {
        let descriptor = |(plane, block, offset, length)| BlockDescriptor {
            plane,
            block,
            offset,
            length,
        };
        Target::Descriptors(list.into_iter().map(descriptor).collect())
    });
    prop_oneof![3 => selection, 1 => descriptors]
}

pub fn grant_name() -> impl Strategy<Value = GrantName> {
    any::<(u128, u32, u32)>().prop_map(|(bits, slot, generation)| GrantName {
        incarnation: Incarnation::from_bits(bits),
        slot: SlotId(slot),
        generation: Generation(generation),
    })
}

pub fn grant() -> impl Strategy<Value = Grant> {
    (grant_name(), address(), target(), any::<(bool, u32, u64, u64)>()).prop_map(|(name, address, target, rest)| {
        Grant {
            address: EndpointAddress {
                incarnation: Some(name.incarnation),
                ..address
            },
            name,
            access: if rest.0 { Access::Write } else { Access::Read },
            pool: PoolId(rest.1),
            geometry_hash: rest.2,
            target,
            remaining_ms: rest.3,
        }
    })
}

pub fn lane() -> impl Strategy<Value = LaneName> {
    any::<(u16, u32)>().prop_map(|(index, epoch)| LaneName { index, epoch })
}

pub fn chunk_name() -> impl Strategy<Value = ChunkName> {
    (any::<(u32, u32, u32)>(), 0..u64::MAX - (1 << 20), 0..=1u32 << 20).prop_map(|(ids, offset, length)| ChunkName {
        slot: SlotId(ids.0),
        generation: Generation(ids.1),
        part: ids.2,
        offset,
        length,
    })
}

pub fn chunk_state() -> impl Strategy<Value = ChunkState> {
    prop::sample::select(
        &[
            ChunkState::Applied,
            ChunkState::Arrived,
            ChunkState::Missing,
            ChunkState::Refused,
        ][..],
    )
}

pub fn chunk_header() -> impl Strategy<Value = ChunkHeader> {
    let bytes = (chunk_name(), extent(), any::<(bool, bool)>()).prop_map(|(name, extent, flags)| ChunkHeader {
        slot: name.slot,
        generation: name.generation,
        part: name.part.min(MESSAGE_PART - 1),
        extent,
        offset: name.offset,
        length: name.length,
        has_message: flags.0,
        checksummed: flags.1,
    });
    let message = (0..=65536u32, any::<bool>()).prop_map(|(length, checksummed)| ChunkHeader {
        slot: SlotId(1),
        generation: Generation(2),
        part: MESSAGE_PART,
        extent: PartExtent {
            token_start: 0,
            token_end: length,
            layer_start: 0,
            layer_end: 0,
            states: false,
        },
        offset: 0,
        length,
        has_message: true,
        checksummed,
    });
    prop_oneof![4 => bytes, 1 => message]
}

pub fn lane_header() -> impl Strategy<Value = LaneHeader> {
    prop_oneof![
        chunk_header().prop_map(LaneHeader::Chunk),
        (chunk_name(), chunk_state()).prop_map(|(name, state)| LaneHeader::Ack(name, state)),
        (any::<u32>(), 1..=EXPORT_BYTES_MAX as u32).prop_map(|(number, bytes)| LaneHeader::Export { number, bytes }),
        any::<u32>().prop_map(|number| LaneHeader::Imported { number }),
        (chunk_header(), 1..=RUNS_MAX).prop_filter_map("messages are not referred to", |(chunk, runs)| {
            let bytes = (runs * RUN_BYTES) as u32;
            let chunk = ChunkHeader {
                checksummed: false,
                ..chunk
            };
            (chunk.part != MESSAGE_PART).then_some(LaneHeader::Reference { chunk, bytes })
        }),
        chunk_name().prop_map(LaneHeader::Declined),
        chunk_name().prop_map(LaneHeader::Validate),
        (chunk_name(), any::<bool>()).prop_map(|(name, counts)| LaneHeader::Validated(name, counts)),
    ]
}

pub fn lane_hello() -> impl Strategy<Value = LaneHello> {
    (any::<(u128, u128, u128)>(), lane()).prop_map(|(ids, lane)| LaneHello {
        from: Incarnation::from_bits(ids.0),
        to: Incarnation::from_bits(ids.1),
        token: ids.2,
        lane,
    })
}

pub fn trailer() -> impl Strategy<Value = Trailer> {
    any::<(bool, u64)>().prop_map(|(valid, checksum)| Trailer { valid, checksum })
}

pub fn pool_advert() -> impl Strategy<Value = PoolAdvert> {
    let keys = vec(("[a-z]{1,8}", vec(any::<u8>(), 0..40)), 0..3);
    (any::<(u32, bool, bool)>(), prop::sample::select(layouts()), keys).prop_map(|(rest, layout, keys)| PoolAdvert {
        id: PoolId(rest.0),
        layout,
        serves: rest.1,
        receives: rest.2,
        keys,
    })
}

pub fn hello() -> impl Strategy<Value = Hello> {
    let transports = vec(("[a-z]{1,8}", vec(any::<u8>(), 0..40)), 0..4);
    let resume = option::of(any::<(u128, u64)>().prop_map(|(session, received)| Resume { session, received }));
    let pools = vec(pool_advert(), 0..3).prop_map(|mut pools| {
        for (id, pool) in pools.iter_mut().enumerate() {
            pool.id = PoolId(id as u32);
        }
        pools
    });
    (
        any::<(u128, Option<u128>, u128)>(),
        ".{0,20}",
        address(),
        resume,
        transports,
        pools,
        1..600_000u32,
    )
        .prop_map(|(ids, name, address, resume, transports, pools, liveness_ms)| Hello {
            versions: (1, 3),
            incarnation: Incarnation::from_bits(ids.0),
            name,
            expects: ids.1.map(Incarnation::from_bits),
            address,
            resume,
            token: ids.2,
            transports,
            pools,
            auth: AuthOffer::None,
            liveness_ms,
        })
}

pub fn message() -> impl Strategy<Value = Message> {
    let claim = || any::<u64>();
    let named = prop_oneof![
        Just(Message::Heartbeat),
        Just(Message::Draining),
        Just(Message::Goodbye),
        pool_advert().prop_map(Message::PoolAdded),
        any::<u32>().prop_map(|id| Message::PoolRemoved(PoolId(id))),
        (claim(), any::<u32>(), any::<u32>()).prop_map(|(claim, attempt, pool)| Message::Matched {
            claim,
            attempt,
            pool: PoolId(pool)
        }),
        (claim(), error()).prop_map(|(claim, error)| Message::ClaimRefused { claim, error }),
        claim().prop_map(|claim| Message::ClaimNothing { claim }),
        (claim(), verdict()).prop_map(|(claim, verdict)| Message::ClaimEnded { claim, verdict }),
        claim().prop_map(|claim| Message::ClaimEndedAck { claim }),
        (claim(), any::<u32>()).prop_map(|(claim, attempt)| Message::Restarted { claim, attempt }),
        (claim(), error()).prop_map(|(claim, error)| Message::SourceEnded { claim, error }),
        (claim(), any::<u32>(), 0..100u32, extent(), option::of(target())).prop_map(
            |(claim, attempt, part, extent, source)| Message::PartReady {
                claim,
                attempt,
                part,
                extent,
                source,
            }
        ),
        (claim(), any::<u32>(), 0..100u32).prop_map(|(claim, attempt, part)| Message::ReadPart {
            claim,
            attempt,
            part
        }),
    ];
    let carrying = prop_oneof![
        (
            vec(any::<u8>(), 1..=256),
            any::<(u64, u128, u32, u64, bool)>(),
            0..u16::MAX
        )
            .prop_map(|(key, rest, member)| {
                Message::Claim(ClaimMessage {
                    claim: rest.0,
                    key,
                    set: rest.1,
                    member,
                    members: member + 1,
                    pool: PoolId(rest.2),
                    remaining_ms: rest.3,
                    pull: rest.4,
                })
            }),
        (claim(), any::<u32>(), grant()).prop_map(|(claim, attempt, grant)| Message::ClaimGrant {
            claim,
            attempt,
            grant
        }),
        (claim(), any::<u32>(), grant()).prop_map(|(claim, attempt, grant)| Message::ClaimPull {
            claim,
            attempt,
            grant
        }),
        (any::<u64>(), grant_name(), grant()).prop_map(|(read, grant, into)| Message::Read { read, grant, into }),
        (any::<u64>(), error()).prop_map(|(read, error)| Message::ReadRefused { read, error }),
        any::<(u64, bool, u32)>().prop_map(|(id, claim, attempt)| Message::Validate { id, claim, attempt }),
        any::<(u64, bool, bool)>().prop_map(|(id, claim, live)| Message::Validated { id, claim, live }),
        (grant_name(), error()).prop_map(|(grant, error)| Message::GrantEnded { grant, error }),
        grant_name().prop_map(|grant| Message::Ask { grant }),
        (grant_name(), verdict()).prop_map(|(grant, verdict)| Message::Verdict { grant, verdict }),
        vec(grant_name(), 0..10).prop_map(|grants| Message::VerdictAck { grants }),
        (lane(), vec(chunk_name(), 0..10)).prop_map(|(lane, chunks)| Message::FenceLane { lane, chunks }),
        (lane(), vec((chunk_name(), chunk_state()), 0..10))
            .prop_map(|(lane, chunks)| Message::LaneFenced { lane, chunks }),
    ];
    let of_links = prop_oneof![
        (any::<u64>(), grant_name()).prop_map(|(read, grant)| Message::ReadDirect { read, grant }),
        ("[a-z]{1,8}", vec(any::<u8>(), 0..60)).prop_map(|(transport, body)| Message::Link { transport, body }),
        ("[a-z]{1,8}", error()).prop_map(|(transport, error)| Message::TransportFailed { transport, error }),
    ];
    prop_oneof![5 => named, 5 => carrying, 1 => of_links]
}

pub fn frame() -> impl Strategy<Value = Frame> {
    let numbered =
        (1..=u64::MAX, any::<u64>(), message()).prop_map(|(sequence, acknowledged, message)| Frame::Message {
            sequence,
            acknowledged,
            message: Box::new(message),
        });
    prop_oneof![
        2 => hello().prop_map(|hello| Frame::Hello(Box::new(hello))),
        1 => error().prop_map(Frame::Refuse),
        1 => any::<(u128, bool, u64)>().prop_map(|(session, resumed, received)| Frame::Ready { session, resumed, received }),
        1 => any::<u64>().prop_map(|acknowledged| Frame::Message {
            sequence: 0,
            acknowledged,
            message: Box::new(Message::Heartbeat)
        }),
        8 => numbered,
    ]
}

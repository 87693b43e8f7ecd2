//! Encoding and decoding what crosses the wire.
#![allow(missing_docs, reason = "the functions are made by a macro")]
#![allow(clippy::unwrap_used, reason = "a benchmark that cannot run has nobody to report to")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvxfer_bench::work::{Named, selection};
use kvxfer_core::flow::{ChunkHeader, PartExtent};
use kvxfer_core::plan::{Scope, Target};
use kvxfer_core::wire::lane::LaneHeader;
use kvxfer_core::wire::{self, Access, EndpointAddress, FRAME_HEADER_BYTES, Frame, Grant, Message, RankCoordinates};
use kvxfer_core::{Generation, GrantName, Incarnation, PoolId, SlotId};

fn grant() -> Grant {
    let work = Named::W5.work(1 << 30).unwrap();
    let layout = work.shape.layout().unwrap();
    let incarnation = Incarnation::from_bits(0x1234_5678_9abc_def0_1234_5678_9abc_def0);
    Grant {
        name: GrantName {
            incarnation,
            slot: SlotId(7),
            generation: Generation(3),
        },
        address: EndpointAddress {
            sockets: vec!["127.0.0.1:7700".parse().unwrap()],
            incarnation: Some(incarnation),
            rank: RankCoordinates::default(),
        },
        access: Access::Write,
        pool: PoolId(1),
        geometry_hash: layout.geometry_hash(),
        target: Target::Selection {
            selection: selection(&layout, &work.destination),
            scope: Scope {
                layers: (0..layout.layers().len() as u16).collect(),
                heads: None,
            },
        },
        remaining_ms: 30_000,
    }
}

fn frame(message: Message) -> Frame {
    Frame::Message {
        sequence: 12,
        acknowledged: 11,
        message: Box::new(message),
    }
}

fn codec(criterion: &mut Criterion) {
    let grant = grant();
    let mut group = criterion.benchmark_group("codec");
    let bytes = grant.to_bytes().unwrap();
    group.throughput(Throughput::Bytes(bytes.len() as u64));
    group.bench_function("grant of w5 to bytes", |bencher| {
        bencher.iter(|| black_box(grant.to_bytes().unwrap()))
    });
    group.bench_function("grant of w5 from bytes", |bencher| {
        bencher.iter(|| black_box(Grant::from_bytes(&bytes).unwrap()));
    });
    let messages = [
        ("heartbeat", Message::Heartbeat),
        (
            "claim grant of w5",
            Message::ClaimGrant {
                claim: 4,
                attempt: 0,
                grant,
            },
        ),
    ];
    for (name, message) in messages {
        let frame = frame(message);
        let bytes = wire::encode(&frame).unwrap();
        let (header, body) = bytes.split_at(FRAME_HEADER_BYTES);
        let header: [u8; FRAME_HEADER_BYTES] = header.try_into().unwrap();
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_function(format!("encode {name}"), |bencher| {
            bencher.iter(|| black_box(wire::encode(&frame).unwrap()));
        });
        group.bench_function(format!("decode {name}"), |bencher| {
            bencher.iter(|| black_box(wire::decode(&header, body).unwrap()));
        });
    }
    let header = LaneHeader::Chunk(ChunkHeader {
        slot: SlotId(7),
        generation: Generation(3),
        part: 1,
        extent: PartExtent::WHOLE,
        offset: 1 << 20,
        length: 1 << 20,
        has_message: false,
        checksummed: false,
    });
    let bytes = header.encode();
    group.throughput(Throughput::Bytes(bytes.len() as u64));
    group.bench_function("encode lane header", |bencher| {
        bencher.iter(|| black_box(header.encode()))
    });
    group.bench_function("decode lane header", |bencher| {
        bencher.iter(|| black_box(LaneHeader::decode(&bytes).unwrap()));
    });
    group.finish();
}

criterion_group!(benches, codec);
criterion_main!(benches);

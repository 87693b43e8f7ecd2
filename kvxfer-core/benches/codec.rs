//! What coding and deciding cost per chunk, per message and per grant.
//!
//! `cargo bench -p kvxfer-core --bench codec`
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvxfer_core::flow::{
    Applied, ByteStream, ChunkHeader, ChunkState, Gate, LaneName, LinkSender, LinkSenderConfig, PartExtent, Placement,
    SendPart, SendSpec, SlotSpec, SlotTable, TransferId,
};
use kvxfer_core::layout::{PoolLayout, Selection};
use kvxfer_core::memory::Segment;
use kvxfer_core::plan::Target;
use kvxfer_core::wire::lane::{LaneHeader, PayloadChecksum};
use kvxfer_core::wire::{Access, EndpointAddress, FRAME_HEADER_BYTES, Frame, Grant, Message, decode, encode};
use kvxfer_core::{Generation, GrantName, Incarnation, PoolId, SlotId, Time};

const PEER: Incarnation = Incarnation::from_bits(7);

fn chunk(slot: SlotId, generation: Generation, offset: u64, length: u32) -> ChunkHeader {
    ChunkHeader {
        slot,
        generation,
        part: 0,
        extent: PartExtent::WHOLE,
        offset,
        length,
        has_message: false,
        checksummed: false,
    }
}

/// A grant of 128 blocks: a request of 2,048 tokens.
fn grant() -> Grant {
    let layout = PoolLayout::opaque(8192, 768).unwrap();
    Grant {
        name: GrantName {
            incarnation: PEER,
            slot: SlotId(3),
            generation: Generation(9),
        },
        address: EndpointAddress {
            incarnation: Some(PEER),
            ..EndpointAddress::bare(([10, 0, 0, 7], 7700).into())
        },
        access: Access::Write,
        pool: PoolId(1),
        geometry_hash: layout.geometry_hash(),
        target: Selection::whole_blocks(1, (0..128).map(|n| n * 5 % 768).collect()).into(),
        remaining_ms: 30_000,
    }
}

fn lane(c: &mut Criterion) {
    let header = LaneHeader::Chunk(chunk(SlotId(3), Generation(9), 1 << 20, 1 << 20));
    let bytes = header.encode();
    c.bench_function("lane header encode", |b| b.iter(|| black_box(&header).encode()));
    c.bench_function("lane header decode", |b| {
        b.iter(|| LaneHeader::decode(black_box(&bytes)).unwrap())
    });
    let payload = vec![0x5a; 1 << 20];
    let mut group = c.benchmark_group("payload checksum");
    group.throughput(Throughput::Bytes(payload.len() as u64));
    group.bench_function("1 MiB", |b| {
        b.iter(|| {
            let mut checksum = PayloadChecksum::new();
            checksum.update(black_box(&payload));
            checksum.value()
        });
    });
    group.finish();
}

fn session(c: &mut Criterion) {
    let frame = Frame::Message {
        sequence: 12,
        acknowledged: 9,
        message: Box::new(Message::ClaimGrant {
            claim: 4,
            attempt: 1,
            grant: grant(),
        }),
    };
    let bytes = encode(&frame).unwrap();
    let (header, body) = bytes.split_first_chunk::<FRAME_HEADER_BYTES>().unwrap();
    c.bench_function("frame with a grant of 128 blocks encode", |b| {
        b.iter(|| encode(black_box(&frame)).unwrap());
    });
    c.bench_function("frame with a grant of 128 blocks decode", |b| {
        b.iter(|| decode(black_box(header), black_box(body)).unwrap());
    });
    let bytes = grant().to_bytes().unwrap();
    c.bench_function("grant of 128 blocks from bytes", |b| {
        b.iter(|| Grant::from_bytes(black_box(&bytes)).unwrap());
    });
}

/// A stream that is nowhere: this measures the decisions.
#[derive(Debug)]
struct Nowhere(u64);

impl ByteStream for Nowhere {
    fn length(&self) -> u64 {
        self.0
    }

    fn segments(&self, _: u64, _: u64, _: usize, _: &mut Vec<Segment>) -> u64 {
        0
    }
}

fn flow(c: &mut Criterion) {
    let gate = Gate::new();
    c.bench_function("gate enter and leave", |b| {
        b.iter(|| black_box(&gate).enter().map(kvxfer_core::flow::GateGuard::leave));
    });

    let layout = Arc::new(PoolLayout::opaque(4096, 1024).unwrap());
    let target: Arc<Target> = Arc::new(Selection::whole_blocks(1, vec![3]).into());
    let table = SlotTable::new(16);
    c.bench_function("slot of one block: open, place, arrive, release", |b| {
        b.iter(|| {
            let spec = SlotSpec {
                layout: layout.clone(),
                regions: Arc::new([]),
                target: target.clone(),
                writer: Some(PEER),
                pool: PoolId(0),
                watcher: None,
            };
            let (slot, generation) = table.open(spec).unwrap();
            let header = chunk(slot, generation, 0, 4096);
            assert!(matches!(table.begin(PEER, &header), Ok(Placement::Place { .. })));
            assert_eq!(table.applied(&header), Applied::Arrived);
            assert!(table.release(slot, generation));
        });
    });

    for transfers in [1u64, 64] {
        let mut sender = LinkSender::new(LinkSenderConfig::default());
        let lane = LaneName { index: 0, epoch: 1 };
        sender.lane_up(lane);
        for id in 0..transfers {
            let spec = SendSpec {
                id: TransferId(id),
                slot: SlotId(id as u32),
                generation: Generation(1),
                gate: Gate::new(),
                regions: Arc::new([]),
                message: None,
                priority: 0,
                deadline: None,
                checksum: false,
                remote: None,
            };
            sender.submit(spec).unwrap();
            let part = SendPart {
                part: 0,
                extent: PartExtent::WHOLE,
                stream: Arc::new(Nowhere(u64::MAX / 2)),
                remote: None,
            };
            sender.add_part(TransferId(id), part);
        }
        let mut now = Time::ZERO;
        c.bench_function(&format!("chunk chosen and acknowledged, {transfers} transfers"), |b| {
            b.iter(|| {
                now = Time::from_nanos(now.as_nanos() + 100_000);
                let chunk = sender.next_chunk(0, now).unwrap();
                sender.acknowledged(lane, chunk.header.name(), ChunkState::Applied, now);
            });
        });
    }
}

criterion_group!(benches, lane, session, flow);
criterion_main!(benches);

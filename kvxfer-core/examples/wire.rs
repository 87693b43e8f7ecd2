//! What crosses the wire: prints an address, a grant and a lane header in their encoded forms, and reads them back.
//!
//! `cargo run -p kvxfer-core --example wire`

use std::io::Write;

use kvxfer_core::flow::{ChunkHeader, PartExtent};
use kvxfer_core::layout::{PoolLayout, Selection};
use kvxfer_core::wire::lane::LaneHeader;
use kvxfer_core::wire::{
    Access, EndpointAddress, FRAME_HEADER_BYTES, Frame, Grant, Message, RankCoordinates, body_length, decode, encode,
};
use kvxfer_core::{Generation, GrantName, Incarnation, PoolId, Result, SlotId};

fn main() -> Result<()> {
    let mut out = std::io::stdout().lock();
    let mut say = |name: &str, text: &str| {
        let _ = writeln!(out, "{name:<22} {text}");
    };

    let incarnation = Incarnation::from_bits(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
    let address = EndpointAddress {
        sockets: vec![([10, 0, 0, 7], 7700).into()],
        incarnation: Some(incarnation),
        rank: RankCoordinates {
            tensor: (3, 4),
            pipeline: (0, 1),
        },
    };
    let text = address.to_string();
    say("address", &text);
    assert_eq!(text.parse::<EndpointAddress>()?, address);
    say("address, as bytes", &hex(&address.to_bytes()));

    let layout = PoolLayout::opaque(65_536, 1024)?;
    let grant = Grant {
        name: GrantName {
            incarnation,
            slot: SlotId(5),
            generation: Generation(2),
        },
        address,
        access: Access::Write,
        pool: PoolId(1),
        geometry_hash: layout.geometry_hash(),
        target: Selection::whole_blocks(1, vec![17, 4, 900]).into(),
        remaining_ms: 5_000,
    };
    let bytes = grant.to_bytes()?;
    say("grant of 3 blocks", &hex(&bytes));
    assert_eq!(Grant::from_bytes(&bytes)?, grant);

    let header = LaneHeader::Chunk(ChunkHeader {
        slot: grant.name.slot,
        generation: grant.name.generation,
        part: 0,
        extent: PartExtent::WHOLE,
        offset: 0,
        length: 3 * 65_536,
        has_message: false,
        checksummed: false,
    });
    say("chunk's header", &hex(&header.encode()));
    assert_eq!(LaneHeader::decode(&header.encode())?, header);

    let frame = Frame::Message {
        sequence: 41,
        acknowledged: 17,
        message: Box::new(Message::ClaimGrant {
            claim: 9,
            attempt: 1,
            grant,
        }),
    };
    let bytes = encode(&frame)?;
    say("session frame", &hex(&bytes));
    let Some((header, body)) = bytes.split_first_chunk::<FRAME_HEADER_BYTES>() else {
        return Ok(());
    };
    assert_eq!(body_length(header)?, body.len());
    assert_eq!(decode(header, body)?, frame);

    let mut damaged = body.to_vec();
    damaged[0] ^= 1;
    if let Err(error) = decode(header, &damaged) {
        say("one bit changed", &error.to_string());
    }
    if let Err(error) = "prefill-0:7700".parse::<EndpointAddress>() {
        say("a name as an address", &error.to_string());
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

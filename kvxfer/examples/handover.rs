//! A hand-over between two endpoints of one process: offer, claim, verify.
//!
//! In production the two endpoints are in two processes on two machines, and what passes between them here in a
//! variable (the prefill side's address, the request's key) travels with the request.
#![allow(clippy::print_stdout)]

use std::time::Duration;

use kvxfer::layout::{Arrangement, Model};
use kvxfer::{ClaimOptions, Endpoint, OfferOptions, Result, Role, Selection};

const TOKENS: u32 = 512;
const TOKENS_PER_BLOCK: u32 = 16;
const WAIT: Duration = Duration::from_secs(10);

fn main() -> Result<()> {
    let model = Model::preset("llama-3.1-8b")?;
    let layout = || model.layout(0, 4, TOKENS_PER_BLOCK, 64, Arrangement::PER_LAYER_NHD);

    // The prefill worker: an endpoint, and a pool that it serves from.
    let prefill = Endpoint::builder()
        .name("prefill-0")
        .listen("127.0.0.1:0".parse().expect("an address"))
        .transports(["tcp"])
        .build()?;
    let source = prefill.allocate(layout()?, Role::Serve)?;

    // The decode worker.
    let decode = Endpoint::builder()
        .name("decode-0")
        .listen("127.0.0.1:0".parse().expect("an address"))
        .transports(["tcp"])
        .build()?;
    let destination = decode.allocate(layout()?, Role::Receive)?;

    // The decode side claims the request and says which of its blocks the cache goes to.
    let claim = decode.claim(
        "request-17",
        &destination,
        &[prefill.address()],
        ClaimOptions::default(),
    )?;
    let received: Vec<u32> = (0..TOKENS / TOKENS_PER_BLOCK).map(|n| 63 - n).collect();
    claim.fill(Selection::single(0, TOKENS, received.clone()))?;

    // The prefill side offers it and releases it chunk by chunk, as its model computes it.
    let offer = prefill.offer("request-17", &source, OfferOptions::default())?;
    let used: Vec<u32> = (0..TOKENS / TOKENS_PER_BLOCK).map(|n| n * 29 % 64).collect();
    for (chunk, blocks) in used.chunks(8).enumerate() {
        for &block in blocks {
            for plane in 0..layout()?.planes().len() as u32 {
                let length = layout()?.planes()[plane as usize].block_length as usize;
                source.copy_in(plane, block, 0, &vec![(block as u8) ^ (plane as u8); length])?;
            }
        }
        let first = chunk as u32 * 8 * TOKENS_PER_BLOCK;
        let end = first + blocks.len() as u32 * TOKENS_PER_BLOCK;
        offer.append(Selection::single(first, end, blocks.to_vec()))?;
        offer.ready(first..end, ..)?;
    }
    offer.finish(TOKENS)?;

    // Both sides learn how it ended.
    let arrival = claim.arrived().wait(WAIT)?;
    let release = offer.released().wait(WAIT)?;
    for (from, to) in used.iter().zip(&received) {
        for plane in 0..layout()?.planes().len() as u32 {
            let mut bytes = vec![0; layout()?.planes()[plane as usize].block_length as usize];
            destination.copy_out(plane, *to, 0, &mut bytes)?;
            assert!(bytes.iter().all(|&byte| byte == (*from as u8) ^ (plane as u8)));
        }
    }
    println!(
        "{} bytes handed over and verified; the source blocks are free: {:?}",
        arrival.bytes, release.members
    );
    print!("{}", prefill.explain(&decode.address()));
    Ok(())
}

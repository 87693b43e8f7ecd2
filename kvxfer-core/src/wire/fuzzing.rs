//! What the fuzz targets and the replay of their seed corpus both run: every parser on any bytes. Each says whether
//! something was parsed, and panics if a parser is not total or does not agree with its encoder.

use super::lane::{HEADER_BYTES, HELLO_BYTES, LaneHeader, LaneHello, TRAILER_BYTES, Trailer};
use super::reference::Run;
use super::{EndpointAddress, FRAME_HEADER_BYTES, Grant, decode, encode, frame, grant, lane};
use crate::layout::PoolLayout;

/// A session frame: as it is, and with a right length and checksum.
pub fn session_frame(bytes: &[u8]) -> bool {
    let mut parsed = false;
    let mut mended = bytes.to_vec();
    frame::mend(&mut mended);
    for bytes in [bytes, &mended] {
        let Some((header, body)) = bytes.split_first_chunk::<FRAME_HEADER_BYTES>() else {
            return false;
        };
        let length = super::body_length(header);
        let Ok(frame) = decode(header, body) else {
            continue;
        };
        parsed = true;
        assert_eq!(length.ok(), Some(body.len()));
        // A skipped frame cannot be made again; anything else says the same when encoded anew.
        if let Ok(again) = encode(&frame) {
            assert_eq!(parse_frame(&again), Some(frame));
        } else {
            assert_eq!(frame, super::Frame::Skipped);
        }
    }
    parsed
}

/// The first bytes of a lane, a header, a trailer and a reference's runs: as they are, and with right checksums.
pub fn lane_bytes(bytes: &[u8]) -> bool {
    let mut some = false;
    if let Some(hello) = bytes.first_chunk::<HELLO_BYTES>() {
        for hello in both(*hello) {
            if let Ok(parsed) = LaneHello::decode(&hello) {
                assert!(LaneHello::is_lane([hello[0], hello[1], hello[2], hello[3]]));
                assert_eq!(parsed.encode(), hello);
                some = true;
            }
        }
    }
    if let Some(header) = bytes.first_chunk::<HEADER_BYTES>() {
        for header in both(*header) {
            if let Ok(parsed) = LaneHeader::decode(&header) {
                assert_eq!(parsed.encode(), header);
                some = true;
            }
        }
    }
    if let Some(trailer) = bytes.first_chunk::<TRAILER_BYTES>()
        && let Ok(parsed) = Trailer::decode(trailer)
    {
        assert_eq!(parsed.encode(), *trailer);
        some = true;
    }
    // A reference's runs, whose sum is then what the first one says.
    let total = bytes
        .get(4..8)
        .and_then(|length| length.try_into().ok())
        .map_or(0, u32::from_le_bytes);
    if let Ok(runs) = Run::decode_all(bytes, total) {
        let mut again = Vec::new();
        runs.iter().for_each(|run| run.encode(&mut again));
        assert_eq!(again, bytes);
        some = true;
    }
    some
}

/// An address, as text (if it is text) and as bytes.
pub fn address(bytes: &[u8]) -> bool {
    let text = std::str::from_utf8(bytes).ok().and_then(|text| text.parse().ok());
    let parsed: [Option<EndpointAddress>; 2] = [text, EndpointAddress::from_bytes(bytes).ok()];
    let some = parsed.iter().any(Option::is_some);
    for address in parsed.into_iter().flatten() {
        let (text, bytes) = (address.to_string(), address.to_bytes());
        assert!(text.len() < 128 && bytes.len() < 128);
        assert_eq!(text.parse::<EndpointAddress>().ok().as_ref(), Some(&address));
        assert_eq!(EndpointAddress::from_bytes(&bytes).ok(), Some(address));
    }
    some
}

/// A grant's bytes: as they are, and with a right length and checksum.
pub fn grant_bytes(bytes: &[u8]) -> bool {
    let mut parsed = false;
    let mut mended = bytes.to_vec();
    grant::mend(&mut mended);
    for bytes in [bytes, &mended] {
        if let Ok(grant) = Grant::from_bytes(bytes) {
            let again = grant.to_bytes().ok();
            assert_eq!(again.and_then(|again| Grant::from_bytes(&again).ok()), Some(grant));
            parsed = true;
        }
    }
    parsed
}

/// A pool layout as it crosses the wire inside Hello.
pub fn layout(bytes: &[u8]) -> bool {
    let Ok(layout) = postcard::from_bytes::<PoolLayout>(bytes) else {
        return false;
    };
    let again = postcard::to_allocvec(&layout).ok();
    let parsed = again.and_then(|again| postcard::from_bytes::<PoolLayout>(&again).ok());
    assert_eq!(parsed.as_ref(), Some(&layout));
    true
}

fn both<const N: usize>(bytes: [u8; N]) -> [[u8; N]; 2] {
    let mut mended = bytes;
    lane::mend(&mut mended);
    [bytes, mended]
}

fn parse_frame(bytes: &[u8]) -> Option<super::Frame> {
    let (header, body) = bytes.split_first_chunk::<FRAME_HEADER_BYTES>()?;
    decode(header, body).ok()
}

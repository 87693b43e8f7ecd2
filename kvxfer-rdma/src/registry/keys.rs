//! The pool keys: what a peer is told of a pool's registrations, and how it finds the key of a byte.

use std::sync::Arc;

use kvxfer_core::transport::RegionAccess;
use kvxfer_core::wire::limits::POOL_KEYS_BYTES_MAX;
use kvxfer_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use super::RegionKeys;

/// Version of the format below. Another one is refused: keys of a pool are useless if not understood whole.
const VERSION: u8 = 1;
/// Devices that a pool can be registered on.
pub const DEVICES_MAX: usize = 32;
/// Regions of a pool.
pub const REGIONS_MAX: usize = 4096;
/// What chunk edges are aligned to, on both sides of the wire.
pub const PAGE_BYTES: u64 = 4096;

/// What the encoding takes at most: a key, a region without its keys, and what comes before the regions.
pub(super) const KEY_BYTES_MAX: usize = 5;
pub(super) const REGION_BYTES_MAX: usize = 3 * 10 + 5;
pub(super) const HEADER_BYTES_MAX: usize = 4 + 5;

/// Where a region is cut into registrations: every `chunk_bytes` from the page that its first byte is in, so that all
/// edges but the region's own lie between pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chunks {
    base: u64,
    length: u64,
    chunk_bytes: u64,
    // Of the first byte, from the start of its page.
    lead: u64,
    count: usize,
}

/// Where a byte is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) chunk: usize,
    pub(super) address: u64,
    pub(super) until_edge: u64,
}

impl Chunks {
    /// `None` if the length is zero, the chunk size not a positive number of pages, or something overflows.
    pub(super) fn new(base: u64, length: u64, chunk_bytes: u64) -> Option<Chunks> {
        let lead = base % PAGE_BYTES;
        if length == 0 || chunk_bytes == 0 || !chunk_bytes.is_multiple_of(PAGE_BYTES) {
            return None;
        }
        base.checked_add(length)?;
        let count = lead.checked_add(length)?.div_ceil(chunk_bytes);
        Some(Chunks {
            base,
            length,
            chunk_bytes,
            lead,
            count: usize::try_from(count).ok()?,
        })
    }

    pub(super) fn base(&self) -> u64 {
        self.base
    }

    pub(super) fn length(&self) -> u64 {
        self.length
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Address of a chunk's first byte. The chunk exists.
    pub(super) fn start(&self, chunk: usize) -> u64 {
        match chunk {
            0 => self.base,
            chunk => self.base - self.lead + chunk as u64 * self.chunk_bytes,
        }
    }

    /// Bytes of a chunk. The chunk exists.
    pub(super) fn bytes(&self, chunk: usize) -> u64 {
        let end = match chunk + 1 {
            next if next < self.count => self.start(next),
            _ => self.base + self.length,
        };
        end - self.start(chunk)
    }

    #[inline]
    pub(super) fn locate(&self, offset: u64) -> Option<Place> {
        if offset >= self.length {
            return None;
        }
        let in_region = self.length - offset;
        if self.count == 1 {
            return Some(Place {
                chunk: 0,
                address: self.base + offset,
                until_edge: in_region,
            });
        }
        let from_page = self.lead + offset;
        let in_chunk = from_page % self.chunk_bytes;
        Some(Place {
            chunk: (from_page / self.chunk_bytes) as usize,
            address: self.base + offset,
            until_edge: in_region.min(self.chunk_bytes - in_chunk),
        })
    }
}

#[derive(Serialize, Deserialize)]
struct Wire {
    version: u8,
    devices: u8,
    serves: bool,
    receives: bool,
    regions: Vec<WireRegion>,
}

#[derive(Serialize, Deserialize)]
struct WireRegion {
    base: u64,
    length: u64,
    chunk_bytes: u64,
    /// By device, then chunk.
    rkeys: Vec<u32>,
}

/// What peers are told.
pub(super) fn encode(devices: usize, regions: &[Arc<RegionKeys>], access: RegionAccess) -> Result<Vec<u8>> {
    let wire = Wire {
        version: VERSION,
        devices: devices as u8,
        serves: access.serves,
        receives: access.receives,
        regions: regions
            .iter()
            .map(|region| WireRegion {
                base: region.chunks.base,
                length: region.chunks.length,
                chunk_bytes: region.chunks.chunk_bytes,
                rkeys: region.devices.iter().flatten().map(|chunk| chunk.rkey).collect(),
            })
            .collect(),
    };
    postcard::to_stdvec(&wire)
        .map_err(|error| Error::new(ErrorKind::Internal, "pool keys were not written").because(error.to_string()))
}

/// A peer's pool: how to reach its regions one-sidedly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteRegions {
    devices: usize,
    access: RegionAccess,
    regions: Vec<RemoteRegion>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct RemoteRegion {
    chunks: Chunks,
    rkeys: Vec<u32>,
}

/// How work requests name a run of a peer's region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteKey {
    /// First byte.
    pub address: u64,
    /// The registration's remote key.
    pub rkey: u32,
    /// Bytes from there to the registration's edge: a work request must not go past it.
    pub until_edge: u64,
}

impl RemoteRegions {
    /// Reads what [`Registered::keys`](kvxfer_core::transport::Registered::keys) of a peer said.
    ///
    /// # Errors
    /// `Protocol` for anything that the peer's own registry would not have written; `Unsupported` for another version.
    pub fn parse(bytes: &[u8]) -> Result<RemoteRegions> {
        if bytes.len() > POOL_KEYS_BYTES_MAX {
            return Err(malformed(format!("{} bytes", bytes.len())));
        }
        match bytes.first() {
            Some(&VERSION) => {}
            Some(other) => {
                return Err(
                    Error::new(ErrorKind::Unsupported, format!("pool keys of version {other}"))
                        .because(format!("this build reads version {VERSION}"))
                        .remedy("use the same kvxfer version on both sides"),
                );
            }
            None => return Err(malformed("nothing".to_owned())),
        }
        let (wire, rest) = postcard::take_from_bytes::<Wire>(bytes).map_err(|error| malformed(error.to_string()))?;
        if !rest.is_empty() {
            return Err(malformed(format!("{} bytes too many", rest.len())));
        }
        let devices = usize::from(wire.devices);
        if devices > DEVICES_MAX || wire.regions.len() > REGIONS_MAX {
            return Err(malformed(format!("{devices} devices, {} regions", wire.regions.len())));
        }
        let regions = wire
            .regions
            .into_iter()
            .enumerate()
            .map(|(index, region)| RemoteRegion::read(index, region, devices))
            .collect::<Result<_>>()?;
        Ok(RemoteRegions {
            devices,
            access: RegionAccess {
                serves: wire.serves,
                receives: wire.receives,
            },
            regions,
        })
    }

    /// Regions in the pool.
    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// Whether the pool has no region.
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Devices that the pool is registered on.
    pub fn devices(&self) -> usize {
        self.devices
    }

    /// What the pool is registered for.
    pub fn access(&self) -> RegionAccess {
        self.access
    }

    /// How a work request that goes to the peer's device `device` names `length` bytes from `offset` of `region`.
    /// `None` if the region or the device is not there, or the run is empty where the region ends or reaches beyond
    /// it. The run may be longer than `until_edge`: what lies beyond has another key.
    #[inline]
    pub fn locate(&self, region: u32, offset: u64, length: u64, device: usize) -> Option<RemoteKey> {
        let region = self.regions.get(region as usize)?;
        if device >= self.devices || offset.checked_add(length)? > region.chunks.length {
            return None;
        }
        let place = region.chunks.locate(offset)?;
        let rkey = *region.rkeys.get(device * region.chunks.count + place.chunk)?;
        Some(RemoteKey {
            address: place.address,
            rkey,
            until_edge: place.until_edge,
        })
    }
}

impl RemoteRegion {
    fn read(index: usize, wire: WireRegion, devices: usize) -> Result<RemoteRegion> {
        let bad = |why: &str| malformed(format!("region {index}: {why}"));
        let chunks = Chunks::new(wire.base, wire.length, wire.chunk_bytes)
            .ok_or_else(|| bad("its range or its chunk size is not possible"))?;
        if chunks.count.checked_mul(devices) != Some(wire.rkeys.len()) {
            return Err(bad("it has not one key for each chunk and device"));
        }
        Ok(RemoteRegion {
            chunks,
            rkeys: wire.rkeys,
        })
    }
}

fn malformed(why: String) -> Error {
    Error::new(ErrorKind::Protocol, "pool keys cannot be read")
        .because(why)
        .remedy("report this with both versions")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn wire(devices: u8, regions: &[(u64, u64, u64)]) -> Wire {
        let mut next = 0x8000_0000u32;
        Wire {
            version: VERSION,
            devices,
            serves: true,
            receives: true,
            regions: regions
                .iter()
                .map(|&(base, length, chunk_bytes)| {
                    let count = Chunks::new(base, length, chunk_bytes).map_or(0, |chunks| chunks.count);
                    let rkeys = (0..count * usize::from(devices))
                        .map(|_| {
                            next += 1;
                            next
                        })
                        .collect();
                    WireRegion {
                        base,
                        length,
                        chunk_bytes,
                        rkeys,
                    }
                })
                .collect(),
        }
    }

    fn bytes(wire: &Wire) -> Vec<u8> {
        postcard::to_stdvec(wire).unwrap()
    }

    #[test]
    fn keys_are_found_by_device_region_and_chunk() {
        let base = 0x10_0000 + 100;
        let text = bytes(&wire(2, &[(0x1000, 4096, 4096), (base, 10_000, 4096)]));
        let remote = RemoteRegions::parse(&text).unwrap();
        assert_eq!((remote.len(), remote.devices()), (2, 2));
        // Region 0 took two keys; region 1 has three chunks: 3996, 4096 and 1908 bytes.
        let key = |offset, device| remote.locate(1, offset, 1, device).unwrap();
        assert_eq!(
            key(0, 0),
            RemoteKey {
                address: base,
                rkey: 0x8000_0003,
                until_edge: 3996
            }
        );
        assert_eq!((key(3995, 0).rkey, key(3995, 0).until_edge), (0x8000_0003, 1));
        assert_eq!((key(3996, 0).rkey, key(3996, 0).until_edge), (0x8000_0004, 4096));
        assert_eq!(key(3996, 0).address % PAGE_BYTES, 0);
        assert_eq!((key(9999, 1).rkey, key(9999, 1).until_edge), (0x8000_0008, 1));
        assert_eq!(remote.locate(1, 10_000, 0, 0), None);
        assert_eq!(remote.locate(1, 9_999, 2, 0), None);
        assert_eq!(remote.locate(1, 1, u64::MAX, 0), None);
        assert_eq!(remote.locate(2, 0, 1, 0), None);
        assert_eq!(remote.locate(0, 0, 1, 2), None);
    }

    #[test]
    fn what_no_registry_writes_is_refused() {
        let refused = |wire: &Wire| RemoteRegions::parse(&bytes(wire)).unwrap_err().kind();
        assert_eq!(refused(&wire(1, &[(u64::MAX - 10, 11, 4096)])), ErrorKind::Protocol);
        assert_eq!(refused(&wire(1, &[(4096, 0, 4096)])), ErrorKind::Protocol);
        assert_eq!(refused(&wire(1, &[(4096, 10, 0)])), ErrorKind::Protocol);
        assert_eq!(refused(&wire(1, &[(4096, 10, 4095)])), ErrorKind::Protocol);
        assert_eq!(refused(&wire(33, &[])), ErrorKind::Protocol);
        let mut short = wire(2, &[(4096, 8192, 4096)]);
        short.regions[0].rkeys.pop();
        assert_eq!(refused(&short), ErrorKind::Protocol);
        let mut many = wire(1, &[]);
        many.regions = (0..REGIONS_MAX + 1)
            .map(|_| wire(1, &[(4096, 1, 4096)]).regions.remove(0))
            .collect();
        assert_eq!(refused(&many), ErrorKind::Protocol);
        let mut other = wire(1, &[]);
        other.version = 2;
        assert_eq!(refused(&other), ErrorKind::Unsupported);
        let mut long = bytes(&wire(1, &[(4096, 10, 4096)]));
        long.push(0);
        assert_eq!(RemoteRegions::parse(&long).unwrap_err().kind(), ErrorKind::Protocol);
        assert_eq!(RemoteRegions::parse(&[]).unwrap_err().kind(), ErrorKind::Protocol);
    }

    #[test]
    fn the_encoding_is_as_small_as_promised() {
        let mut largest = wire(1, &[]);
        largest.regions = (0..200)
            .map(|_| WireRegion {
                base: u64::MAX,
                length: u64::MAX,
                chunk_bytes: u64::MAX,
                rkeys: vec![u32::MAX; 200],
            })
            .collect();
        let most = HEADER_BYTES_MAX + 200 * (REGION_BYTES_MAX + 200 * KEY_BYTES_MAX);
        assert!(bytes(&largest).len() <= most, "{} > {most}", bytes(&largest).len());
    }

    proptest! {
        /// Chunks tile the region without gap or overlap, all edges inside it lie between pages, and every byte is found
        /// in the chunk that holds it.
        #[test]
        fn chunks_tile_the_region(base in 0u64..1 << 40, length in 1u64..1 << 20, pages in 1u64..40, at in any::<prop::sample::Index>()) {
            let chunks = Chunks::new(base, length, pages * PAGE_BYTES).unwrap();
            let mut end = base;
            for chunk in 0..chunks.count() {
                prop_assert_eq!(chunks.start(chunk), end);
                prop_assert!(chunk == 0 || end % PAGE_BYTES == 0);
                prop_assert!((1..=pages * PAGE_BYTES).contains(&chunks.bytes(chunk)));
                end += chunks.bytes(chunk);
            }
            prop_assert_eq!(end, base + length);
            let offset = at.index(length as usize) as u64;
            let place = chunks.locate(offset).unwrap();
            prop_assert_eq!(place.address, base + offset);
            prop_assert!(chunks.start(place.chunk) <= place.address);
            prop_assert_eq!(place.address + place.until_edge, chunks.start(place.chunk) + chunks.bytes(place.chunk));
            prop_assert_eq!(chunks.locate(length), None);
        }

        #[test]
        fn any_bytes_are_read_or_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..300), versioned in any::<bool>()) {
            if let (true, Some(first)) = (versioned, bytes.first_mut()) {
                *first = VERSION;
            }
            probe(&bytes);
        }

        #[test]
        fn damaged_keys_are_read_or_refused(
            devices in 0u8..4,
            regions in prop::collection::vec((any::<u64>(), any::<u64>(), 0u64..3), 0..6),
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            cut in any::<prop::sample::Index>(),
        ) {
            let regions: Vec<_> = regions.into_iter().map(|(base, length, pages)| (base, length % (1 << 18), pages * PAGE_BYTES)).collect();
            let mut text = bytes(&wire(devices, &regions));
            for (at, value) in damage {
                let at = at.index(text.len());
                text[at] = value;
            }
            probe(&text);
            probe(&text[..cut.index(text.len())]);
        }
    }

    /// Whatever is accepted names only bytes inside the regions that it claims.
    fn probe(bytes: &[u8]) {
        let Ok(remote) = RemoteRegions::parse(bytes) else {
            return;
        };
        for (index, region) in remote.regions.iter().enumerate() {
            for offset in [
                0,
                1,
                region.chunks.length / 2,
                region.chunks.length - 1,
                region.chunks.length,
                u64::MAX,
            ] {
                for device in 0..=remote.devices {
                    let Some(key) = remote.locate(index as u32, offset, 1, device) else {
                        assert!(device == remote.devices || offset >= region.chunks.length);
                        continue;
                    };
                    assert!(key.until_edge >= 1);
                    assert!(key.address >= region.chunks.base);
                    assert!(key.address + key.until_edge <= region.chunks.base + region.chunks.length);
                }
            }
        }
    }
}

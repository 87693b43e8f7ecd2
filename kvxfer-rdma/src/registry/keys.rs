//! The pool keys: what a peer is told of a pool's registrations, and how it finds the key of a byte.

use std::sync::Arc;

use kvxfer_core::transport::RegionAccess;
use kvxfer_core::wire::limits::POOL_KEYS_BYTES_MAX;
use kvxfer_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use super::chunks::Chunks;
use super::{Reach, RegionKeys};

/// Version of the format below. Another one is refused: keys of a pool are useless if not understood whole.
const VERSION: u8 = 2;
/// Devices that a pool can be registered on.
pub const DEVICES_MAX: usize = 32;
/// Regions of a pool.
pub const REGIONS_MAX: usize = 4096;
/// What chunk edges are aligned to, on both sides of the wire.
pub const PAGE_BYTES: u64 = 4096;

/// What the encoding takes at most: a key, an edge between mappings, a region without those, and what comes before the
/// regions.
pub(super) const KEY_BYTES_MAX: usize = 5;
pub(super) const EDGE_BYTES_MAX: usize = 10;
pub(super) const REGION_BYTES_MAX: usize = 3 * 10 + 2 * 5 + 2 + 10;
pub(super) const HEADER_BYTES_MAX: usize = 4 + 5;

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
    /// Its registration's number at its owner.
    id: u64,
    reach: WireReach,
}

#[derive(Serialize, Deserialize)]
enum WireReach {
    Registered {
        base: u64,
        length: u64,
        chunk_bytes: u64,
        /// Where mappings begin, but for the first.
        edges: Vec<u64>,
        /// The owner's processor can read it too.
        visible: bool,
        /// By device, then chunk.
        rkeys: Vec<u32>,
    },
    /// No device can be given it: its owner copies.
    Staged { length: u64 },
}

/// What peers are told.
pub(super) fn encode(devices: usize, regions: &[Arc<RegionKeys>], access: RegionAccess) -> Result<Vec<u8>> {
    let wire_reach = |region: &Arc<RegionKeys>| match &region.reach {
        Reach::Devices { chunks, devices } => WireReach::Registered {
            base: chunks.base(),
            length: chunks.length(),
            chunk_bytes: chunks.chunk_bytes(),
            edges: chunks.edges().collect(),
            visible: region.is_visible(),
            rkeys: devices.iter().flatten().map(|chunk| chunk.rkey).collect(),
        },
        Reach::Staging => WireReach::Staged {
            length: region.region.length(),
        },
    };
    let wire_region = |region: &Arc<RegionKeys>| WireRegion {
        id: region.id(),
        reach: wire_reach(region),
    };
    let wire = Wire {
        version: VERSION,
        devices: devices as u8,
        serves: access.serves,
        receives: access.receives,
        regions: regions.iter().map(wire_region).collect(),
    };
    let bytes = postcard::to_stdvec(&wire)
        .map_err(|error| Error::new(ErrorKind::Internal, "pool keys were not written").because(error.to_string()))?;
    Ok(bytes)
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
    id: u64,
    reach: RemoteReach,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum RemoteReach {
    Registered {
        chunks: Chunks,
        rkeys: Vec<u32>,
        visible: bool,
    },
    Staged,
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

    /// Whether no device was given some of its regions: their owner copies what goes in and out.
    pub fn is_staged(&self) -> bool {
        self.regions.iter().any(|region| region.reach == RemoteReach::Staged)
    }

    /// A region's number at its owner.
    pub(crate) fn id(&self, region: u32) -> Option<u64> {
        self.regions.get(region as usize).map(|region| region.id)
    }

    /// Whether its owner's processor can look at what lands in all of its regions.
    pub fn is_visible(&self) -> bool {
        let visible = |region: &RemoteRegion| matches!(region.reach, RemoteReach::Registered { visible: true, .. });
        self.regions.iter().all(visible)
    }

    /// How a work request that goes to the peer's device `device` names `length` bytes from `offset` of `region`.
    /// `None` if the region or the device is not there, or the run is empty where the region ends or reaches beyond
    /// it. The run may be longer than `until_edge`: what lies beyond has another key.
    #[inline]
    pub fn locate(&self, region: u32, offset: u64, length: u64, device: usize) -> Option<RemoteKey> {
        let RemoteReach::Registered { chunks, rkeys, .. } = &self.regions.get(region as usize)?.reach else {
            return None;
        };
        if device >= self.devices || offset.checked_add(length)? > chunks.length() {
            return None;
        }
        let place = chunks.locate(offset)?;
        let rkey = *rkeys.get(device * chunks.count() + place.chunk)?;
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
        let id = wire.id;
        let (chunks, rkeys, visible) = match wire.reach {
            WireReach::Staged { .. } => {
                let reach = RemoteReach::Staged;
                return Ok(RemoteRegion { id, reach });
            }
            WireReach::Registered {
                base,
                length,
                chunk_bytes,
                edges,
                visible,
                rkeys,
            } => (Chunks::new(base, length, chunk_bytes, &edges), rkeys, visible),
        };
        let chunks = chunks.ok_or_else(|| bad("its range, its mappings or its chunk size is not possible"))?;
        if chunks.count().checked_mul(devices) != Some(rkeys.len()) {
            return Err(bad("it has not one key for each chunk and device"));
        }
        let reach = RemoteReach::Registered { chunks, rkeys, visible };
        Ok(RemoteRegion { id, reach })
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
                    let count = Chunks::new(base, length, chunk_bytes, &[]).map_or(0, |chunks| chunks.count());
                    let rkeys = (0..count * usize::from(devices))
                        .map(|_| {
                            next += 1;
                            next
                        })
                        .collect();
                    WireRegion {
                        id: base,
                        reach: WireReach::Registered {
                            base,
                            length,
                            chunk_bytes,
                            edges: Vec::new(),
                            visible: true,
                            rkeys,
                        },
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
    fn staged_regions_have_no_keys() {
        let mut some = wire(1, &[(4096, 4096, 4096)]);
        assert!(!RemoteRegions::parse(&bytes(&some)).unwrap().is_staged());
        some.regions.push(WireRegion {
            id: 9,
            reach: WireReach::Staged { length: 100 },
        });
        let remote = RemoteRegions::parse(&bytes(&some)).unwrap();
        assert!(remote.is_staged() && !remote.is_visible());
        assert_eq!((remote.id(0), remote.id(1), remote.id(2)), (Some(4096), Some(9), None));
        assert!(remote.locate(0, 0, 1, 0).is_some() && remote.locate(1, 0, 1, 0).is_none());
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
        let WireReach::Registered { rkeys, .. } = &mut short.regions[0].reach else {
            panic!("it was just made");
        };
        rkeys.pop();
        assert_eq!(refused(&short), ErrorKind::Protocol);
        let mut torn = wire(1, &[(4096, 4096, 4096)]);
        let WireReach::Registered { edges, .. } = &mut torn.regions[0].reach else {
            panic!("it was just made");
        };
        edges.push(4096);
        assert_eq!(refused(&torn), ErrorKind::Protocol);
        let mut many = wire(1, &[]);
        many.regions = (0..REGIONS_MAX + 1)
            .map(|_| wire(1, &[(4096, 1, 4096)]).regions.remove(0))
            .collect();
        assert_eq!(refused(&many), ErrorKind::Protocol);
        let mut other = wire(1, &[]);
        other.version = VERSION + 1;
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
                id: u64::MAX,
                reach: WireReach::Registered {
                    base: u64::MAX,
                    length: u64::MAX,
                    chunk_bytes: u64::MAX,
                    edges: vec![u64::MAX; 50],
                    visible: true,
                    rkeys: vec![u32::MAX; 200],
                },
            })
            .collect();
        let most = HEADER_BYTES_MAX + 200 * (REGION_BYTES_MAX + 50 * EDGE_BYTES_MAX + 200 * KEY_BYTES_MAX);
        assert!(bytes(&largest).len() <= most, "{} > {most}", bytes(&largest).len());
    }

    proptest! {
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
            let RemoteReach::Registered { chunks, .. } = &region.reach else {
                assert!(remote.locate(index as u32, 0, 1, 0).is_none());
                continue;
            };
            for offset in [
                0,
                1,
                chunks.length() / 2,
                chunks.length() - 1,
                chunks.length(),
                u64::MAX,
            ] {
                for device in 0..=remote.devices {
                    let Some(key) = remote.locate(index as u32, offset, 1, device) else {
                        assert!(device == remote.devices || offset >= chunks.length());
                        continue;
                    };
                    assert!(key.until_edge >= 1);
                    assert!(key.address >= chunks.base());
                    assert!(key.address + key.until_edge <= chunks.base() + chunks.length());
                }
            }
        }
    }
}

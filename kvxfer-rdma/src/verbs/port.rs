//! Ports: their state, their addresses, their partitions.

use super::context::{Context, positive};
use super::error::{VerbsError, last_errno};
use crate::sys;

/// What a port is and can carry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortAttributes {
    /// Whether it can carry data.
    pub state: PortState,
    /// What its packets travel on.
    pub link_layer: LinkLayer,
    /// The largest packet that the link carries now.
    pub active_mtu: Mtu,
    /// The largest packet that the port could carry.
    pub max_mtu: Mtu,
    /// Bytes of the largest message.
    pub max_message_bytes: u32,
    /// Local identifier (InfiniBand; 0 on Ethernet).
    pub lid: u16,
    /// Entries of the table of GIDs.
    pub gid_table_length: u32,
    /// Entries of the table of partition keys.
    pub pkey_table_length: u16,
    /// Rate of the link in Mbit/s, as the port says; 0 if it does not.
    pub rate_mbps: u64,
}

/// Whether a port can carry data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortState {
    /// No link.
    Down,
    /// The link is up, the subnet manager has not configured it.
    Initialising,
    /// Configured, not yet active.
    Armed,
    /// Can carry data.
    Active,
    /// Active, with the link down for the moment.
    ActiveDeferred,
    /// Not one of these.
    Unknown,
}

/// What a port's packets travel on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand, addressed by LID or GID.
    InfiniBand,
    /// Ethernet (RoCE), addressed by GID.
    Ethernet,
    /// The driver does not say, which in practice means InfiniBand.
    Unspecified,
}

/// A packet size that verbs know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mtu {
    /// 256 bytes.
    Bytes256,
    /// 512 bytes.
    Bytes512,
    /// 1024 bytes.
    Bytes1024,
    /// 2048 bytes.
    Bytes2048,
    /// 4096 bytes.
    Bytes4096,
}

impl Mtu {
    /// All, from the smallest.
    pub const ALL: [Mtu; 5] = [
        Mtu::Bytes256,
        Mtu::Bytes512,
        Mtu::Bytes1024,
        Mtu::Bytes2048,
        Mtu::Bytes4096,
    ];

    /// Payload bytes of a packet.
    pub fn bytes(self) -> u32 {
        128 << self.raw()
    }

    /// The MTU of exactly this many bytes.
    pub fn from_bytes(bytes: u32) -> Option<Mtu> {
        Mtu::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
    }

    /// `enum ibv_mtu`.
    pub fn raw(self) -> u32 {
        match self {
            Mtu::Bytes256 => sys::IBV_MTU_256,
            Mtu::Bytes512 => sys::IBV_MTU_512,
            Mtu::Bytes1024 => sys::IBV_MTU_1024,
            Mtu::Bytes2048 => sys::IBV_MTU_2048,
            Mtu::Bytes4096 => sys::IBV_MTU_4096,
        }
    }

    /// From `enum ibv_mtu`.
    pub fn from_raw(raw: u32) -> Option<Mtu> {
        Mtu::ALL.into_iter().find(|mtu| mtu.raw() == raw)
    }
}

impl std::fmt::Display for Mtu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.bytes())
    }
}

/// One address of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GidEntry {
    /// Its place in the port's table, which is how a queue pair names it.
    pub index: u32,
    /// The address: an IPv6 address, or an IPv4 one mapped into IPv6, or subnet prefix and port number.
    pub gid: [u8; 16],
    /// How packets from it are framed.
    pub kind: GidKind,
    /// The network interface behind it; 0 if there is none or it is not known.
    pub interface_index: u32,
}

/// How packets from a GID are framed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GidKind {
    /// InfiniBand.
    Ib,
    /// RoCE version 1: Ethernet frames, not routed.
    RoceV1,
    /// RoCE version 2: UDP.
    RoceV2,
}

impl Context {
    /// What port `port` (from 1) is now.
    ///
    /// # Errors
    /// [`VerbsError::Refused`]: `EINVAL` for a port that is not there, `ENODEV`/`EIO` for a device that is gone.
    pub fn port(&self, port: u8) -> Result<PortAttributes, VerbsError> {
        // SAFETY: a plain struct of integers, for which zero is a value.
        let mut attributes: sys::ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open. The exported symbol fills the older, shorter form of the struct, a prefix of
        // `ibv_port_attr` (all but `port_cap_flags2`), which the headers' inline function also passes to it so.
        let code = unsafe {
            self.verbs().ibv_query_port(
                self.raw(),
                port,
                (&raw mut attributes).cast::<sys::_compat_ibv_port_attr>(),
            )
        };
        if code != 0 {
            return Err(self
                .refused("ibv_query_port", positive(code))
                .because(format!("port {port} of {}", self.attributes().ports)));
        }
        // An MTU that is out of range (0 while a link is down) is taken for the smallest: it is then never too large.
        let mtu = |raw| Mtu::from_raw(raw).unwrap_or(Mtu::Bytes256);
        Ok(PortAttributes {
            state: match attributes.state {
                sys::IBV_PORT_DOWN => PortState::Down,
                sys::IBV_PORT_INIT => PortState::Initialising,
                sys::IBV_PORT_ARMED => PortState::Armed,
                sys::IBV_PORT_ACTIVE => PortState::Active,
                sys::IBV_PORT_ACTIVE_DEFER => PortState::ActiveDeferred,
                _ => PortState::Unknown,
            },
            link_layer: match u32::from(attributes.link_layer) {
                sys::IBV_LINK_LAYER_INFINIBAND => LinkLayer::InfiniBand,
                sys::IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                _ => LinkLayer::Unspecified,
            },
            active_mtu: mtu(attributes.active_mtu),
            max_mtu: mtu(attributes.max_mtu),
            max_message_bytes: attributes.max_msg_sz,
            lid: attributes.lid,
            gid_table_length: u32::try_from(attributes.gid_tbl_len).unwrap_or(0),
            pkey_table_length: attributes.pkey_tbl_len,
            rate_mbps: rate_mbps(attributes.active_width, attributes.active_speed),
        })
    }

    /// The port's addresses; entries that are all zero are left out.
    ///
    /// Read with `ibv_query_gid_ex` where the library has it; else with `ibv_query_gid`, and the kinds and interfaces
    /// from sysfs.
    ///
    /// # Errors
    /// As [`port`](Self::port).
    pub fn gids(&self, port: u8) -> Result<Vec<GidEntry>, VerbsError> {
        let attributes = self.port(port)?;
        let mut entries = Vec::new();
        for index in 0..attributes.gid_table_length {
            let entry = match self.query_gid_ex(port, index) {
                Some(entry) => entry?,
                None => Some(self.query_gid(port, index, attributes.link_layer)?),
            };
            entries.extend(entry.filter(|entry| entry.gid != [0; 16]));
        }
        Ok(entries)
    }

    /// The partition key at this place of the port's table, in host order; the top bit says full membership.
    ///
    /// # Errors
    /// [`VerbsError::Refused`]: `EINVAL` beyond the table.
    pub fn pkey(&self, port: u8, index: u16) -> Result<u16, VerbsError> {
        let mut pkey = 0;
        // SAFETY: the context is open; the library writes one 16-bit number.
        let code = unsafe {
            self.verbs()
                .ibv_query_pkey(self.raw(), port, i32::from(index), &mut pkey)
        };
        if code != 0 {
            return Err(self
                .refused("ibv_query_pkey", positive(code))
                .because(format!("index {index} of port {port}")));
        }
        Ok(u16::from_be(pkey))
    }

    /// `None` if the library, the kernel or the device does not have this query. An entry that is not set, which the
    /// kernel reports as an error, is `Some(Ok(None))`.
    fn query_gid_ex(&self, port: u8, index: u32) -> Option<Result<Option<GidEntry>, VerbsError>> {
        let query = self.verbs()._ibv_query_gid_ex.as_ref().ok()?;
        // SAFETY: a plain struct of integers and bytes, for which zero is a value.
        let mut entry: sys::ibv_gid_entry = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open; the library writes at most the size that is passed.
        let code = unsafe {
            query(
                self.raw(),
                u32::from(port),
                index,
                &mut entry,
                0,
                size_of::<sys::ibv_gid_entry>() as sys::size_t,
            )
        };
        match if code == 0 { 0 } else { positive(code) } {
            0 => Some(Ok(Some(GidEntry {
                index,
                // SAFETY: every bit pattern is a GID.
                gid: unsafe { entry.gid.raw },
                kind: match entry.gid_type {
                    sys::IBV_GID_TYPE_IB => GidKind::Ib,
                    sys::IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
                    _ => GidKind::RoceV2,
                },
                interface_index: entry.ndev_ifindex,
            }))),
            libc::ENODATA => Some(Ok(None)),
            libc::EOPNOTSUPP | libc::ENOSYS | libc::EPROTONOSUPPORT => None,
            errno => Some(Err(self
                .refused("ibv_query_gid_ex", errno)
                .because(format!("index {index} of port {port}")))),
        }
    }

    fn query_gid(&self, port: u8, index: u32, layer: LinkLayer) -> Result<GidEntry, VerbsError> {
        let mut gid = sys::ibv_gid { raw: [0; 16] };
        // SAFETY: the context is open; the library writes one GID.
        let code = unsafe { self.verbs().ibv_query_gid(self.raw(), port, index as i32, &mut gid) };
        if code != 0 {
            return Err(self
                .refused("ibv_query_gid", last_errno())
                .because(format!("index {index} of port {port}")));
        }
        let attribute = |name: &str| {
            let path = self.sysfs_path().join(format!("ports/{port}/gid_attrs/{name}/{index}"));
            std::fs::read_to_string(path).ok()
        };
        let kind = match layer {
            LinkLayer::InfiniBand | LinkLayer::Unspecified => GidKind::Ib,
            LinkLayer::Ethernet => match attribute("types") {
                Some(text) if text.contains("v2") => GidKind::RoceV2,
                // Version 1 was the only one when sysfs had no types.
                _ => GidKind::RoceV1,
            },
        };
        let interface_index = attribute("ndevs")
            .and_then(|name| std::fs::read_to_string(format!("/sys/class/net/{}/ifindex", name.trim())).ok())
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(0);
        Ok(GidEntry {
            index,
            // SAFETY: every bit pattern is a GID.
            gid: unsafe { gid.raw },
            kind,
            interface_index,
        })
    }
}

/// Width and speed are codes of the InfiniBand specification, which RoCE drivers imitate.
fn rate_mbps(width: u8, speed: u8) -> u64 {
    let lanes = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    };
    let per_lane = match speed {
        1 => 2_500,
        2 => 5_000,
        4 => 10_000,
        8 => 10_312,
        16 => 14_062,
        32 => 25_781,
        64 => 50_000,
        128 => 100_000,
        _ => 0,
    };
    lanes * per_lane
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtus_are_their_bytes() {
        assert_eq!(Mtu::ALL.map(Mtu::bytes), [256, 512, 1024, 2048, 4096]);
        for mtu in Mtu::ALL {
            assert_eq!(Mtu::from_raw(mtu.raw()), Some(mtu));
            assert_eq!(Mtu::from_bytes(mtu.bytes()), Some(mtu));
        }
        assert_eq!(Mtu::from_raw(0), None);
        assert_eq!(Mtu::from_bytes(1500), None);
    }

    /// With the system's devices, if there are any: what sysfs and `ibv_query_gid` say is what `ibv_query_gid_ex` says.
    #[test]
    fn the_two_ways_of_reading_gids_agree() {
        let Ok(library) = crate::verbs::Library::load(None) else {
            return;
        };
        for name in library.device_names().unwrap_or_default() {
            let Ok(context) = Context::open(&library, &name) else {
                continue;
            };
            let layer = context.port(1).unwrap().link_layer;
            for entry in context.gids(1).unwrap() {
                let other = context.query_gid(1, entry.index, layer).unwrap();
                assert_eq!(entry, other, "{name}");
            }
        }
    }

    #[test]
    fn rates_of_known_links() {
        assert_eq!(rate_mbps(2, 128), 400_000); // 4x NDR
        assert_eq!(rate_mbps(2, 32), 103_124); // 4x EDR
        assert_eq!(rate_mbps(1, 1), 2_500); // what soft-RoCE says
        assert_eq!(rate_mbps(3, 1), 0);
    }
}

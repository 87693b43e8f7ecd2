//! A device in use: its limits, its ports, and the little memory of our own that rails write to when they are tried.

use kvxfer_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::advert::{AdvertGid, GIDS_MAX, PortAdvert};
use crate::config::RdmaConfig;
use crate::error::RdmaError;
use crate::gid::{self, PeerGid};
use crate::topology::{Subnet, subnet_of};
use crate::verbs::{
    Access, Context, GidEntry, GidKind, LinkLayer, MemoryRegion, Mtu, PortAttributes, PortState, ProtectionDomain,
};

/// Bytes of a probe, and of the memory that it goes to: the largest path MTU.
const PROBE_BYTES: usize = 4096;
/// A work request's bytes, at most, whatever the port could do.
const MESSAGE_BYTES_MAX: u64 = 1 << 20;

/// A device in use by one engine.
pub(crate) struct Device {
    /// Its index in the keys of pools.
    pub(crate) index: usize,
    pub(crate) name: String,
    pub(crate) context: Context,
    pub(crate) domain: ProtectionDomain,
    /// Segments that one write may gather, and that one read may scatter to.
    pub(crate) send_segments: u32,
    pub(crate) read_segments: u32,
    pub(crate) queue_depth: u32,
    pub(crate) receive_depth: u32,
    pub(crate) message_bytes_max: u64,
    pub(crate) reads_served: u8,
    pub(crate) reads_started: u8,
    pub(crate) gid_index: Option<u32>,
    ports: Mutex<Vec<Port>>,
    probe: ProbeMemory,
}

/// An address of a port that reaches the peer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Way {
    pub(crate) own: GidEntry,
    /// Packets must carry the addresses.
    pub(crate) routed: bool,
}

/// A port in use.
#[derive(Debug, Clone)]
pub(crate) struct Port {
    /// Its index in our advert.
    pub(crate) advert: u16,
    pub(crate) number: u8,
    pub(crate) active: bool,
    pub(crate) layer: LinkLayer,
    pub(crate) lid: u16,
    pub(crate) mtu: Mtu,
    pub(crate) gids: Vec<GidEntry>,
}

/// Where peers' probes and empty closes go, and what is read to flush the device.
struct ProbeMemory {
    // Dropped before the memory.
    target: MemoryRegion,
    source: MemoryRegion,
    flush: MemoryRegion,
    // Peers write the first page; probes are read from the second; flushes read the third into the fourth.
    _pages: Box<Pages>,
    address: u64,
}

#[repr(align(4096))]
struct Pages([u8; 4 * PROBE_BYTES]);

impl ProbeMemory {
    fn new(domain: &ProtectionDomain) -> Result<ProbeMemory> {
        let pages = Box::new(Pages([0; 4 * PROBE_BYTES]));
        let address = pages.0.as_ptr() as u64;
        let verbs = |error| Error::from(RdmaError::Verbs(error));
        let page = PROBE_BYTES as u64;
        let none = Access {
            local_write: false,
            remote_write: false,
            remote_read: false,
            relaxed_ordering: false,
        };
        let written = Access {
            local_write: true,
            remote_write: true,
            ..none
        };
        let local = Access {
            local_write: true,
            ..none
        };
        let read = Access {
            remote_read: true,
            ..none
        };
        // SAFETY: the pages are boxed, are dropped after their registrations (field order), and no reference to their
        // content exists: nobody looks at what is written there.
        unsafe {
            Ok(ProbeMemory {
                target: domain.register(address, page, written).map_err(verbs)?,
                source: domain.register(address + page, 3 * page, local).map_err(verbs)?,
                flush: domain.register(address + 2 * page, page, read).map_err(verbs)?,
                _pages: pages,
                address,
            })
        }
    }
}

impl Device {
    /// Opens what an engine needs of a device whose ports were found to be usable.
    ///
    /// # Errors
    /// What the device refuses, or lacks.
    pub(crate) fn new(index: usize, context: Context, ports: Vec<(u16, u8)>, config: &RdmaConfig) -> Result<Device> {
        let verbs = |error| Error::from(RdmaError::Verbs(error));
        let limits = context.attributes().clone();
        let domain = ProtectionDomain::new(&context).map_err(verbs)?;
        let probe = ProbeMemory::new(&domain)?;
        // A queue pair's depth and a bit must fit the device, and so must the completions of both its queues.
        let slack = crate::engine::QUEUE_SLACK;
        let receive_depth = config.receive_depth.min(limits.max_qp_wr.max(1));
        let completions_max = limits.max_cqe.saturating_sub(receive_depth + slack);
        let queue_depth = config
            .queue_depth
            .min(limits.max_qp_wr.saturating_sub(slack))
            .min(completions_max);
        if queue_depth < 8 {
            return Err(Error::new(ErrorKind::Unsupported, format!("device {}", context.name()))
                .because(format!(
                    "its queue pairs have {} work requests and its completion queues {} entries: too few",
                    limits.max_qp_wr, limits.max_cqe
                ))
                .remedy("leave the device out of `devices`"));
        }
        let reads = |count: u32| count.min(u32::from(u8::MAX)) as u8;
        let device = Device {
            index,
            name: context.name().to_owned(),
            domain,
            // More than this is never worth a larger queue pair.
            send_segments: limits.max_sge.clamp(1, 16),
            read_segments: limits.max_sge_rd.min(limits.max_sge).clamp(1, 16),
            queue_depth,
            receive_depth,
            message_bytes_max: MESSAGE_BYTES_MAX,
            reads_served: reads(limits.max_qp_rd_atom),
            reads_started: reads(limits.max_qp_init_rd_atom),
            gid_index: config.gid_index,
            ports: Mutex::new(Vec::new()),
            probe,
            context,
        };
        let mut found = Vec::new();
        for (advert, number) in ports {
            let port = device.look(advert, number)?;
            found.push(port);
        }
        *device.ports.lock() = found;
        Ok(device)
    }

    fn look(&self, advert: u16, number: u8) -> Result<Port> {
        let verbs = |error| Error::from(RdmaError::Verbs(error));
        let attributes: PortAttributes = self.context.port(number).map_err(verbs)?;
        Ok(Port {
            advert,
            number,
            active: attributes.state == PortState::Active,
            layer: attributes.link_layer,
            lid: attributes.lid,
            mtu: attributes.active_mtu,
            gids: self.context.gids(number).map_err(verbs)?,
        })
    }

    /// Reads a port's state and addresses again. True if the addresses in use changed.
    pub(crate) fn refresh(&self, number: u8) -> bool {
        let advert = self
            .ports
            .lock()
            .iter()
            .find(|port| port.number == number)
            .map(|port| port.advert);
        let Some(advert) = advert else { return false };
        match self.look(advert, number) {
            Ok(fresh) => {
                let mut ports = self.ports.lock();
                let Some(port) = ports.iter_mut().find(|port| port.number == number) else {
                    return false;
                };
                let changed = port.gids != fresh.gids || port.lid != fresh.lid;
                *port = fresh;
                changed
            }
            Err(error) => {
                tracing::warn!(device = self.name, port = number, %error, "a port could not be looked at");
                false
            }
        }
    }

    /// A port by its index in our advert, if it is active.
    ///
    /// # Errors
    /// `Transport` if it is down.
    pub(crate) fn port(&self, advert: u16) -> Result<Port> {
        let number = self.port_number(advert).unwrap_or(0);
        let inactive = self
            .ports
            .lock()
            .iter()
            .any(|port| port.advert == advert && !port.active);
        if inactive {
            // Perhaps its event is still on its way.
            self.refresh(number);
        }
        let port = self.ports.lock().iter().find(|port| port.advert == advert).cloned();
        match port {
            Some(port) if port.active => Ok(port),
            Some(_) => Err(Error::new(ErrorKind::Transport, "the port is not active")
                .at(format!("{}:{number}", self.name))
                .because("its link is down")
                .remedy("check the cable or `ip link`; the rail comes back by itself")),
            None => Err(Error::new(ErrorKind::Internal, "a port of another device").at(self.name.clone())),
        }
    }

    /// The first port, active or not: enough to reach oneself.
    pub(crate) fn first_port(&self) -> Result<Port> {
        self.ports.lock().first().cloned().ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, format!("device {}", self.name)).because("it has no usable port")
        })
    }

    pub(crate) fn port_number(&self, advert: u16) -> Option<u8> {
        self.ports
            .lock()
            .iter()
            .find(|port| port.advert == advert)
            .map(|port| port.number)
    }

    /// The port, for people.
    pub(crate) fn port_text(&self, advert: u16) -> String {
        format!("{}:{}", self.name, self.port_number(advert).unwrap_or(0))
    }

    /// What peers are told of the ports.
    pub(crate) fn adverts(&self, interfaces: &[Subnet]) -> Vec<PortAdvert> {
        // Not under the lock, which choosing a GID takes.
        let ports = self.ports.lock().clone();
        ports.iter().map(|port| self.advert(port, interfaces)).collect()
    }

    fn advert(&self, port: &Port, interfaces: &[Subnet]) -> PortAdvert {
        let mut left = port.gids.clone();
        let mut best = Vec::new();
        // The best, then the best of the rest: a peer may only reach that.
        while best.len() < GIDS_MAX
            && let Some(gid) = gid::choose(&left, port.layer, self.gid_index, &[]).local
        {
            left.retain(|other| *other != gid);
            best.push(gid);
        }
        PortAdvert {
            device: self.index as u8,
            name: self.name.chars().take(32).collect(),
            number: port.number,
            ethernet: port.layer == LinkLayer::Ethernet,
            lid: port.lid,
            subnet: best.first().and_then(|gid| subnet_of(gid, interfaces)),
            gids: best
                .iter()
                .map(|gid| AdvertGid {
                    gid: gid.gid,
                    version_2: gid.kind == GidKind::RoceV2,
                })
                .collect(),
        }
    }

    /// The port's address for a way to one of the peer's, and whether packets must carry addresses.
    ///
    /// # Errors
    /// `Unsupported` if the port has none that could reach it, with the reason for each.
    pub(crate) fn gid_for(&self, port: &Port, peer: &[PeerGid]) -> Result<Way> {
        let choice = gid::choose(&port.gids, port.layer, self.gid_index, peer);
        tracing::debug!(device = self.name, port = port.number, "addresses:\n{}", choice.table());
        match choice.local {
            Some(own) => Ok(Way {
                routed: choice.routed,
                own,
            }),
            None => Err(
                Error::new(ErrorKind::Unsupported, "no address of the port reaches the peer")
                    .at(format!("{}:{}", self.name, port.number))
                    .because(choice.table())
                    .remedy("give the port's interface an IP address in the peer's network, or set rdma.gid_index"),
            ),
        }
    }

    /// The index of a partition key.
    ///
    /// # Errors
    /// `InvalidArgument` if the port is not a member of the partition.
    pub(crate) fn partition_index(&self, port: u8, key: Option<u16>) -> Result<u16> {
        let Some(key) = key else { return Ok(0) };
        let length = self
            .context
            .port(port)
            .map_err(|error| Error::from(RdmaError::Verbs(error)))?
            .pkey_table_length;
        // The top bit says full or limited membership, and does not belong to the number.
        let same = |other: u16| other & 0x7fff == key & 0x7fff;
        (0..length)
            .find(|index| self.context.pkey(port, *index).is_ok_and(same))
            .ok_or_else(|| {
                Error::new(ErrorKind::InvalidArgument, format!("partition key {key:#06x}"))
                    .at(format!("{}:{port}", self.name))
                    .because("the port is not a member of that partition")
                    .remedy("ask the subnet manager's owner, or leave rdma.partition_key out")
            })
    }

    /// Where peers may write to find out whether a rail works.
    pub(crate) fn probe_address(&self) -> u64 {
        self.probe.address
    }

    pub(crate) fn probe_key(&self) -> u32 {
        self.probe.target.rkey()
    }

    /// A page that probes are written from, and flushes read into: address, length, local key.
    pub(crate) fn probe_source(&self) -> (u64, u32, u32) {
        (
            self.probe.address + PROBE_BYTES as u64,
            PROBE_BYTES as u32,
            self.probe.source.lkey(),
        )
    }

    /// A page that the device may read of itself: address and key.
    pub(crate) fn flush_page(&self) -> (u64, u32) {
        (self.probe.address + 2 * PROBE_BYTES as u64, self.probe.flush.rkey())
    }
}

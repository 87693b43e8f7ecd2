//! What devices send each other: one header and at most [`FRAGMENT`] bytes a message.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The most payload of one packet, in bytes: small enough that a work request of 1 MiB is placed in many steps.
pub(crate) const FRAGMENT: usize = 64 * 1024;

/// A port's address: its GID, or its LID in the place of one.
pub(crate) type Address = [u8; 16];

/// The address of a port that is reached by its LID.
pub(crate) fn lid_address(lid: u16) -> Address {
    let mut address = [0; 16];
    address[..4].copy_from_slice(b"\xffLID");
    address[4..6].copy_from_slice(&lid.to_be_bytes());
    address
}

/// The fixed part of each packet. Both ends are the same build, so it is in native byte order.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) source: Address,
    pub(crate) destination: Address,
    /// Where the request reads or writes at the responder.
    pub(crate) remote_address: u64,
    pub(crate) queue_pair: u32,
    pub(crate) psn: u32,
    /// The remote key of the request.
    pub(crate) key: u32,
    /// Writes: the bytes of the whole request. Reads: the bytes asked for, from `remote_address` on.
    pub(crate) total: u32,
    pub(crate) immediate: u32,
    /// One of [`kind`].
    pub(crate) kind: u8,
    /// Of [`flag`].
    pub(crate) flags: u8,
    /// NAK: one of [`nak`]. Receiver not ready: the timer code.
    pub(crate) code: u8,
    /// Requests: the path MTU that the requester goes by, as in `IBV_MTU_...`.
    pub(crate) mtu: u8,
}

/// Kinds of packets.
pub(crate) mod kind {
    /// A piece of a WRITE.
    pub(crate) const WRITE: u8 = 1;
    /// A READ request.
    pub(crate) const READ: u8 = 2;
    /// A piece of a READ's answer.
    pub(crate) const READ_RESPONSE: u8 = 3;
    /// Everything up to `psn` was accepted.
    pub(crate) const ACK: u8 = 4;
    /// `psn` was refused.
    pub(crate) const NAK: u8 = 5;
    /// No receive was posted for `psn`.
    pub(crate) const NOT_READY: u8 = 6;
}

/// Flags of WRITE packets.
pub(crate) mod flag {
    /// The request's first packet.
    pub(crate) const FIRST: u8 = 1;
    /// Its last one.
    pub(crate) const LAST: u8 = 2;
    /// With an immediate (on the last one).
    pub(crate) const IMMEDIATE: u8 = 4;
}

/// Why a request was refused.
pub(crate) mod nak {
    /// A packet before it is missing.
    pub(crate) const SEQUENCE: u8 = 0;
    /// The key, the bounds or the rights.
    pub(crate) const ACCESS: u8 = 1;
    /// More READs at once than agreed.
    pub(crate) const INVALID: u8 = 2;
}

/// Packet sequence numbers have 24 bits and wrap.
const PSN_MASK: u32 = 0x00ff_ffff;

/// `psn + count`, wrapped.
pub(crate) fn psn_add(psn: u32, count: u32) -> u32 {
    psn.wrapping_add(count) & PSN_MASK
}

/// How far `a` is after `b`, negative if before.
pub(crate) fn psn_distance(a: u32, b: u32) -> i32 {
    (a.wrapping_sub(b) << 8) as i32 >> 8
}

/// The bytes of an `IBV_MTU_...`.
pub(crate) fn mtu_bytes(mtu: u32) -> u32 {
    128 << mtu.min(5)
}

/// How many packets that many bytes take; at least one.
pub(crate) fn packets(length: usize) -> u32 {
    u32::try_from(length.div_ceil(FRAGMENT).max(1)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_mtus_are_powers_of_two() {
        assert_eq!((mtu_bytes(1), mtu_bytes(5)), (256, 4096));
    }

    #[test]
    fn sequence_numbers_wrap() {
        assert_eq!(psn_add(0x00ff_ffff, 1), 0);
        assert_eq!(psn_distance(0, 0x00ff_ffff), 1);
        assert_eq!(psn_distance(0x00ff_fffe, 1), -3);
        assert_eq!(
            (packets(0), packets(1), packets(FRAGMENT), packets(FRAGMENT + 1)),
            (1, 1, 1, 2)
        );
    }
}

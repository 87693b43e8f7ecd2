//! The caps of the wire format: one place, with units. A frame over a cap is refused by whoever reads it.

/// Text of an address, in bytes, at most.
pub const ADDRESS_TEXT_MAX: usize = 127;
/// Sockets of an address, at most.
pub const ADDRESS_SOCKETS_MAX: usize = 2;
/// A session frame's body, in bytes, at most: 4 MiB. A Hello with the largest pools fits; KV bytes never travel here.
pub const FRAME_BODY_BYTES_MAX: usize = 4 << 20;
/// A serialised grant, in bytes, at most: it fits in a frame with its message.
pub const GRANT_BYTES_MAX: usize = FRAME_BODY_BYTES_MAX - 4096;
/// An endpoint's name, in bytes, at most.
pub const NAME_BYTES_MAX: usize = 256;
/// A hand-off's key, in bytes, at most; at least one.
pub const KEY_BYTES_MAX: usize = 256;
/// Transports in a Hello, at most.
pub const TRANSPORTS_MAX: usize = 16;
/// A transport's name, in bytes, at most.
pub const TRANSPORT_NAME_BYTES_MAX: usize = 32;
/// A transport's advert, in bytes, at most.
pub const ADVERT_BYTES_MAX: usize = 1024;
/// What a transport says of a pool's regions, in bytes, at most: 64 KiB.
pub const POOL_KEYS_BYTES_MAX: usize = 64 << 10;
/// A message between the ends of a link, in bytes, at most: 128 KiB (a user message fits).
pub const LINK_MESSAGE_BYTES_MAX: usize = 128 << 10;
/// Pools in a Hello, at most.
pub const POOLS_MAX: usize = 64;
/// Cache groups of a selection, at most.
pub const GROUPS_MAX: usize = 64;
/// Blocks of one cache group of a selection, at most.
pub const BLOCKS_MAX: usize = 1 << 20;
/// Layers of a scope, at most.
pub const LAYERS_MAX: usize = 4096;
/// Explicit block descriptors of a target, at most.
pub const DESCRIPTORS_MAX: usize = 1 << 18;
/// Chunks in a lane fence and in its answer, at most: what one lane may have outstanding.
pub const FENCE_CHUNKS_MAX: usize = crate::flow::LANE_CHUNKS_MAX as usize;
/// Grants in one acknowledgement of verdicts, at most.
pub const VERDICTS_MAX: usize = 1024;
/// Text of an error, in bytes, at most.
pub const ERROR_BYTES_MAX: usize = 16 << 10;
/// The longest liveness a peer may ask for: 10 minutes, in milliseconds. At least 1.
pub const LIVENESS_MS_MAX: u32 = 600_000;

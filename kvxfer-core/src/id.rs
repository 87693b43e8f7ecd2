//! Identities: who (incarnation), where (pool, slot) and which life of it (generation).

use std::fmt;

use serde::{Deserialize, Serialize};

/// An endpoint's identity: 128 random bits, new at every start.
///
/// A name is a label; only the incarnation identifies. Everything that crosses the wire is bound to one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Incarnation(u128);

impl Incarnation {
    /// The identity made of these bits. The runtime draws them from the system's random source.
    pub const fn from_bits(bits: u128) -> Self {
        Incarnation(bits)
    }

    /// The 128 bits.
    pub const fn bits(self) -> u128 {
        self.0
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}…", self.0 >> 96)
    }
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub u32);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

number! {
    /// A pool within one incarnation. Never reused while the endpoint lives.
    PoolId
}
number! {
    /// An entry of an endpoint's slot table: where a grant's progress is kept.
    SlotId
}
number! {
    /// Which use of a slot is meant; it grows by one each time the slot is given to a new grant.
    Generation
}

/// The name of a grant: unique for ever, because incarnations are and generations only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GrantName {
    /// The endpoint that owns the blocks.
    pub incarnation: Incarnation,
    /// Its slot.
    pub slot: SlotId,
    /// Which use of the slot.
    pub generation: Generation,
}

impl fmt::Display for GrantName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}.{}", self.incarnation, self.slot, self.generation)
    }
}

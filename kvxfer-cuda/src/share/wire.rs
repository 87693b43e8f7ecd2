//! What endpoints on one host say to each other about memory: one message each on a socket that keeps their edges.
//!
//! Whoever connects is believed nothing: a message that cannot be read closes its connection.

use kvxfer_core::memory::EXPORT_BYTES_MAX;
use serde::{Deserialize, Serialize};

/// The protocol's number, in descriptions. There is no other yet; a change of any structure here is another.
const VERSION: u8 = 1;
/// Bytes of a message, at most.
pub(super) const MESSAGE_BYTES_MAX: usize = 1024;
/// Mappings that one message is about, each with a descriptor beside it. Few enough that descriptors never pile up.
pub(super) const MAPPINGS_AT_ONCE: usize = 32;
/// Mappings of one export.
pub(super) const MAPPINGS_MAX: u32 = 1 << 16;
/// Characters of a reason.
const REASON_MAX: usize = 600;

/// A name or a secret: 128 random bits.
pub(super) type Token = [u8; 16];

/// What an importer has to know of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Description {
    version: u8,
    /// Whose it is: the name that its socket is made of.
    pub(super) owner: Token,
    /// Which one.
    pub(super) token: Token,
    /// Bytes of the region.
    pub(super) length: u64,
}

/// What an importer says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Said {
    /// It wants to map an export, or the mappings from `first` on of one that it was told some of.
    Map {
        /// Its name for it on this connection.
        id: u64,
        token: Token,
        first: u32,
        /// The PCI address of the device that will copy.
        device: String,
    },
    /// It has unmapped it, or never mapped it.
    LetGo { id: u64 },
}

/// What the owner answers, or says by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Told {
    Part(Part),
    /// The importer is not given it.
    Refused {
        id: u64,
        why: String,
    },
    /// The importer is to let go of it.
    Recalled {
        id: u64,
    },
}

/// An export, or some of its mappings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) id: u64,
    /// The PCI address of the device that it is on.
    pub(super) device: String,
    /// Bytes of the region, and where in the first mapping it begins.
    pub(super) length: u64,
    pub(super) head: u64,
    pub(super) form: Form,
}

/// How memory is handed over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Form {
    /// To the process that it is in: the region's address.
    Here(u64),
    /// An ordinary allocation: the driver's handle of it, in two halves, and its bytes.
    Allocation { handle: [[u8; 32]; 2], length: u64 },
    /// Mappings of virtual memory management: how many there are in all, which is the first here, and the bytes of each, with a
    /// descriptor beside the message for each.
    Mappings { total: u32, first: u32, lengths: Vec<u64> },
}

impl Description {
    pub(super) fn new(owner: Token, token: Token, length: u64) -> Description {
        Description {
            version: VERSION,
            owner,
            token,
            length,
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// `None`: it is of another version, or none at all.
    pub(super) fn decode(bytes: &[u8]) -> Option<Description> {
        if bytes.len() > EXPORT_BYTES_MAX {
            return None;
        }
        decode(bytes).filter(|description: &Description| description.version == VERSION && description.length > 0)
    }
}

impl Told {
    pub(super) fn refused(id: u64, why: impl Into<String>) -> Told {
        let mut why = why.into();
        // At a character's edge, wherever that is.
        while why.len() > REASON_MAX {
            why.pop();
        }
        Told::Refused { id, why }
    }
}

impl Part {
    /// Whether the numbers can be true of an export with so many bytes, as far as this part goes.
    pub(super) fn is_plausible(&self, length: u64, descriptors: usize) -> bool {
        let fits = |whole: u64| self.head.checked_add(length).is_some_and(|end| end <= whole);
        self.length == length
            && match &self.form {
                Form::Here(address) => self.head == 0 && descriptors == 0 && address.checked_add(length).is_some(),
                Form::Allocation { length: whole, .. } => descriptors == 0 && fits(*whole),
                Form::Mappings { total, first, lengths } => {
                    let end = u64::from(*first) + lengths.len() as u64;
                    descriptors == lengths.len()
                        && (1..=MAPPINGS_AT_ONCE).contains(&lengths.len())
                        && *total <= MAPPINGS_MAX
                        && end <= u64::from(*total)
                        && lengths.iter().all(|bytes| *bytes > 0)
                }
            }
    }
}

pub(super) fn encode(message: &impl Serialize) -> Vec<u8> {
    // Fails only for types that have no length of their own, of which there are none here.
    postcard::to_stdvec(message).unwrap_or_default()
}

/// `None` if it is not such a message, from the first to the last byte.
pub(super) fn decode<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Option<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Some(message),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn part(form: Form) -> Part {
        Part {
            id: u64::MAX,
            device: "00000000:17:00.0".into(),
            length: 1 << 40,
            head: u64::MAX - (1 << 41),
            form,
        }
    }

    #[test]
    fn the_longest_messages_fit() {
        let longest = [
            encode(&Told::Part(part(Form::Mappings {
                total: u32::MAX,
                first: u32::MAX,
                lengths: vec![u64::MAX; MAPPINGS_AT_ONCE],
            }))),
            encode(&Told::Part(part(Form::Allocation {
                handle: [[255; 32]; 2],
                length: u64::MAX,
            }))),
            encode(&Told::refused(u64::MAX, "ä".repeat(MESSAGE_BYTES_MAX))),
            encode(&Said::Map {
                id: u64::MAX,
                token: [255; 16],
                first: u32::MAX,
                device: "00000000:17:00.0".into(),
            }),
        ];
        assert!(longest.iter().all(|message| message.len() <= MESSAGE_BYTES_MAX));
        let description = Description::new([255; 16], [255; 16], u64::MAX).encode();
        assert!(description.len() <= EXPORT_BYTES_MAX);
    }

    #[test]
    fn a_description_of_another_version_is_none() {
        let good = Description::new([1; 16], [2; 16], 3);
        assert_eq!(Description::decode(&good.encode()), Some(good));
        let mut other = good.encode();
        other[0] = VERSION + 1;
        assert_eq!(Description::decode(&other), None);
        assert_eq!(Description::decode(&good.encode()[..10]), None);
        assert_eq!(Description::decode(&[good.encode(), vec![0]].concat()), None);
        assert_eq!(
            Description::decode(&Description::new([1; 16], [2; 16], 0).encode()),
            None
        );
    }

    #[test]
    fn numbers_that_cannot_be_are_noticed() {
        let of = |head, form| Part {
            length: 100,
            head,
            ..part(form)
        };
        let allocation = |head, length| {
            of(
                head,
                Form::Allocation {
                    handle: [[0; 32]; 2],
                    length,
                },
            )
        };
        assert!(allocation(28, 128).is_plausible(100, 0));
        assert!(
            !allocation(29, 128).is_plausible(100, 0),
            "it ends behind the allocation"
        );
        assert!(!allocation(28, 128).is_plausible(100, 1), "a descriptor too many");
        assert!(
            !allocation(28, 128).is_plausible(99, 0),
            "another length than described"
        );
        assert!(!allocation(u64::MAX, 128).is_plausible(100, 0));
        assert!(!of(0, Form::Here(u64::MAX - 50)).is_plausible(100, 0));
        let mappings = |total, first, count| {
            let lengths = vec![1; count];
            of(0, Form::Mappings { total, first, lengths })
        };
        assert!(mappings(40, 8, 32).is_plausible(100, 32));
        assert!(!mappings(40, 9, 32).is_plausible(100, 32));
        assert!(!mappings(40, 8, 32).is_plausible(100, 31));
        assert!(!mappings(40, 8, 0).is_plausible(100, 0));
        assert!(!mappings(MAPPINGS_MAX + 1, 0, 1).is_plausible(100, 1));
    }

    proptest! {
        #[test]
        fn random_bytes_are_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Description::decode(&bytes);
            let _ = decode::<Said>(&bytes);
            if let Some(Told::Part(part)) = decode::<Told>(&bytes) {
                let _ = part.is_plausible(part.length, 0);
            }
        }
    }
}

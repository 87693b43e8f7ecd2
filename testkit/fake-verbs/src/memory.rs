//! Memory regions: keys, and the checks that each access goes through.

use std::collections::HashMap;
use std::os::raw::c_void;

use crate::objects::{FakeMr, FakePd};

/// Remote keys differ from local ones in this bit, so that one used as the other is noticed.
const REMOTE: u32 = 1 << 31;
const TAG_BITS: u32 = 8;

/// A registered region.
pub(crate) struct Region {
    /// Its key, without [`REMOTE`].
    key: u32,
    pd: &'static FakePd,
    /// Where the first byte is in this process.
    memory: *mut u8,
    /// The address that requests use for it.
    address: u64,
    length: u64,
    access: u32,
    /// What was mapped for it (a dmabuf): address and length.
    mapping: Option<(*mut c_void, usize)>,
}

// SAFETY: the memory is only touched as a device would; the owner of the registration promised that it stays.
unsafe impl Send for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some((address, length)) = self.mapping {
            // SAFETY: mapped when the region was registered, and used by nobody else.
            unsafe { libc::munmap(address, length) };
        }
    }
}

/// What is to be registered.
pub(crate) struct NewRegion {
    /// The protection domain.
    pub(crate) pd: &'static FakePd,
    /// Where the first byte is.
    pub(crate) memory: *mut u8,
    /// The address that requests use for it.
    pub(crate) address: u64,
    /// In bytes.
    pub(crate) length: u64,
    /// As given to the verb.
    pub(crate) access: u32,
    /// What was mapped for it.
    pub(crate) mapping: Option<(*mut c_void, usize)>,
}

/// All regions of a context.
#[derive(Default)]
pub(crate) struct Regions {
    by_index: HashMap<u32, Region>,
    handles: HashMap<usize, u32>,
    last_index: u32,
    tag: u8,
    /// Bytes registered now.
    pub(crate) registered: u64,
}

impl Regions {
    /// Registers a region; gives its local and remote keys.
    pub(crate) fn add(&mut self, new: NewRegion) -> (u32, u32) {
        self.last_index += 1;
        while self.by_index.contains_key(&self.last_index) || self.last_index >= REMOTE >> TAG_BITS {
            self.last_index = if self.last_index >= REMOTE >> TAG_BITS {
                1
            } else {
                self.last_index + 1
            };
        }
        self.tag = self.tag.wrapping_add(0x35);
        let key = self.last_index << TAG_BITS | u32::from(self.tag);
        self.registered += new.length;
        self.by_index.insert(
            self.last_index,
            Region {
                key,
                pd: new.pd,
                memory: new.memory,
                address: new.address,
                length: new.length,
                access: new.access,
                mapping: new.mapping,
            },
        );
        (key, key | REMOTE)
    }

    /// Remembers which handle stands for the region with that local key.
    pub(crate) fn name(&mut self, handle: &FakeMr, local_key: u32) {
        self.handles
            .insert(std::ptr::from_ref(handle).addr(), local_key >> TAG_BITS);
    }

    /// Where the region of a handle lies in this process: first address and length.
    pub(crate) fn extent(&self, handle: &FakeMr) -> Option<(usize, usize)> {
        let index = self.handles.get(&std::ptr::from_ref(handle).addr())?;
        let region = self.by_index.get(index)?;
        Some((region.memory.addr(), usize::try_from(region.length).ok()?))
    }

    /// Deregisters; nothing more is read or written through it.
    pub(crate) fn remove(&mut self, handle: &FakeMr) {
        if let Some(index) = self.handles.remove(&std::ptr::from_ref(handle).addr())
            && let Some(region) = self.by_index.remove(&index)
        {
            self.registered -= region.length;
        }
    }

    /// The memory that a local key and address name, if the region is of that domain, has the rights and holds it all.
    pub(crate) fn local(&self, pd: &FakePd, key: u32, address: u64, length: u64, access: u32) -> Option<*mut u8> {
        if key & REMOTE != 0 {
            return None;
        }
        self.find(pd, key, address, length, access)
    }

    /// As [`Regions::local`], for a remote key.
    pub(crate) fn remote(&self, pd: &FakePd, key: u32, address: u64, length: u64, access: u32) -> Option<*mut u8> {
        if key & REMOTE == 0 {
            return None;
        }
        self.find(pd, key & !REMOTE, address, length, access)
    }

    /// Where the memory of the region with that remote key lies in this process, in all registrations that share
    /// addresses with it: first address and length of each.
    pub(crate) fn remote_extents(&self, key: u32) -> Vec<(usize, usize)> {
        let Some(read) = self.by_index.get(&((key & !REMOTE) >> TAG_BITS)) else {
            return Vec::new();
        };
        let shares = |other: &&Region| {
            other.address < read.address.saturating_add(read.length)
                && read.address < other.address.saturating_add(other.length)
        };
        let extent = |region: &Region| {
            (
                region.memory.addr(),
                usize::try_from(region.length).unwrap_or(usize::MAX),
            )
        };
        self.by_index.values().filter(shares).map(extent).collect()
    }

    fn find(&self, pd: &FakePd, key: u32, address: u64, length: u64, access: u32) -> Option<*mut u8> {
        let region = self.by_index.get(&(key >> TAG_BITS))?;
        let offset = address.checked_sub(region.address)?;
        let fits = offset <= region.length && length <= region.length - offset;
        let allowed = region.key == key && std::ptr::eq(region.pd, pd) && region.access & access == access;
        (fits && allowed).then(|| region.memory.wrapping_add(offset as usize))
    }
}

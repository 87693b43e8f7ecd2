//! A copy of the domain's: where its bytes are, and what may be wrong when it runs.

use std::ffi::c_void;
use std::sync::Weak;
use std::time::Instant;

use kvxfer_core::memory::CopyTicket;
use kvxfer_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustix::mm::{MapFlags, ProtFlags};

use super::sharing::InFlight;
use crate::rng::mix;

/// What a staging buffer is filled with while a gather into it runs: who sends it before `Done` sends this.
pub(super) const UNFINISHED: u8 = 0xEB;

/// A piece of a region: its bytes, where it begins, how long it is.
pub(super) type Piece = (Weak<Storage>, usize, usize);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Gather,
    Scatter,
}

#[derive(Debug)]
pub(super) struct Job {
    pub(super) ticket: CopyTicket,
    pub(super) due: Instant,
    pub(super) staging: Staging,
    pub(super) pieces: Vec<Piece>,
    pub(super) from: From,
}

/// Where a copy's bytes come from, or go to.
#[derive(Debug)]
pub(super) enum From {
    /// A staging buffer. Of a scatter: what its bytes must still be when the copy runs.
    Staging(Option<u64>),
    /// Another domain's memory.
    Import(InFlight),
}

impl Job {
    pub(super) fn copy(&self) -> Result<(), String> {
        let expected = match &self.from {
            From::Staging(expected) => *expected,
            From::Import(held) => return self.copy_import(held),
        };
        let who = format!(
            "ticket {} on staging buffer {:#x}+{}",
            self.ticket.0, self.staging.address, self.staging.length
        );
        let mut position = 0;
        // SAFETY: the caller of `start_*` keeps the buffer alive until `Done`, which is set after this.
        let staging = unsafe { self.staging.bytes_mut() };
        match expected {
            Some(sum) if checksum(staging) != sum => {
                return Err(format!("{who}: rewritten before its scatter was done"));
            }
            None if staging.iter().any(|byte| *byte != UNFINISHED) => {
                return Err(format!("{who}: rewritten before its gather was done"));
            }
            _ => {}
        }
        for (storage, offset, length) in &self.pieces {
            let Some(storage) = storage.upgrade() else {
                return Err(format!("{who}: the region was dropped before the copy was done"));
            };
            let mut bytes = storage.bytes.lock();
            let run = &mut bytes[*offset..offset + length];
            let part = &mut staging[position..position + length];
            match expected {
                Some(_) => run.copy_from_slice(part),
                None => part.copy_from_slice(run),
            }
            position += length;
        }
        Ok(())
    }

    pub(super) fn copy_import(&self, held: &InFlight) -> Result<(), String> {
        let who = format!("ticket {}", self.ticket.0);
        let mut bytes = held.read().map_err(|why| format!("{who}: {why}"))?;
        for (storage, offset, length) in &self.pieces {
            let Some(storage) = storage.upgrade() else {
                return Err(format!("{who}: the region was dropped before the copy was done"));
            };
            let rest = bytes.split_off(*length);
            storage.bytes.lock()[*offset..offset + length].copy_from_slice(&bytes);
            bytes = rest;
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Staging {
    pub(super) address: usize,
    pub(super) length: usize,
}

impl Staging {
    pub(super) fn overlaps(&self, other: &Staging) -> bool {
        self.address < other.address + other.length && other.address < self.address + self.length
    }

    pub(super) fn contains(&self, other: &Staging) -> bool {
        self.address <= other.address && other.address + other.length <= self.address + self.length
    }

    /// # Safety
    /// The buffer is alive and nothing writes it meanwhile.
    pub(super) unsafe fn bytes<'a>(&self) -> &'a [u8] {
        if self.length == 0 {
            return &[];
        }
        // SAFETY: upheld by the caller.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.length) }
    }

    /// # Safety
    /// The buffer is alive and nothing else touches it meanwhile.
    pub(super) unsafe fn bytes_mut<'a>(&self) -> &'a mut [u8] {
        if self.length == 0 {
            return &mut [];
        }
        // SAFETY: upheld by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.length) }
    }
}

#[derive(Debug)]
pub(super) struct Storage {
    pub(super) range: AddressRange,
    pub(super) bytes: Mutex<Box<[u8]>>,
}

/// Address space without access: a name for memory that faults when the CPU touches it.
#[derive(Debug)]
pub(super) struct AddressRange {
    pub(super) base: *mut c_void,
    pub(super) length: usize,
}

// SAFETY: only an address; nothing is ever read or written there.
unsafe impl Send for AddressRange {}
// SAFETY: as above.
unsafe impl Sync for AddressRange {}

impl AddressRange {
    pub(super) fn reserve(length: usize) -> Result<AddressRange> {
        // SAFETY: a new mapping at an address of the system's choice; it replaces nothing.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, ProtFlags::empty(), MapFlags::PRIVATE) };
        match base {
            Ok(base) => Ok(AddressRange { base, length }),
            Err(error) => Err(
                Error::new(ErrorKind::ResourceExhausted, format!("{length} bytes of address space"))
                    .because(error.to_string()),
            ),
        }
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        // SAFETY: mapped by `reserve` with this length, never handed out as memory. Failure leaves a reservation.
        let _ = unsafe { rustix::mm::munmap(self.base, self.length) };
    }
}

pub(super) fn checksum(bytes: &[u8]) -> u64 {
    let mut sum = bytes.len() as u64;
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        sum = mix(sum ^ u64::from_le_bytes(word));
    }
    sum
}

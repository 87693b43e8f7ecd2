//! Copies out of other endpoints' memory, into the device's own: handed over as scatters are, with what is mapped in the
//! place of staging.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvxfer_core::memory::{CopyState, CopyTicket, ImportedRun, Region, Segment};
use kvxfer_core::transport::Counter;
use kvxfer_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use super::Domain;
use super::copier::Copier;
use super::job::{Direction, Piece};
use crate::share::Use;

/// Tickets of these copies have this bit, which the copier's never get to.
const MARK: u64 = 1 << 63;

/// The copies that are not known to have ended, with what stays mapped for them. Dropped after the copier.
pub(super) struct ImportCopies {
    under_way: Mutex<HashMap<u64, Vec<Use>>>,
    /// The copier has left some to themselves.
    abandoned: Arc<AtomicBool>,
    copies: AtomicU64,
    bytes: AtomicU64,
}

impl ImportCopies {
    pub(super) fn new(copier: &Copier) -> ImportCopies {
        ImportCopies {
            under_way: Mutex::default(),
            abandoned: copier.abandoned(),
            copies: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        }
    }

    pub(super) fn report(&self, device: &str, out: &mut Vec<Counter>) {
        let counted = [
            ("cuda_import_copies_total", &self.copies),
            ("cuda_import_bytes_total", &self.bytes),
        ];
        out.extend(counted.map(|(name, count)| Counter {
            name,
            labels: vec![("device", device.to_owned())],
            value: count.load(Ordering::Relaxed) as f64,
        }));
    }
}

impl Drop for ImportCopies {
    fn drop(&mut self) {
        let under_way = std::mem::take(self.under_way.get_mut());
        if self.abandoned.load(Ordering::Acquire) && !under_way.is_empty() {
            tracing::warn!(
                copies = under_way.len(),
                "other endpoints' memory stays mapped: a device may still copy from it"
            );
            std::mem::forget(under_way);
        }
    }
}

/// Whether a ticket is of such a copy.
pub(super) fn is_one(ticket: CopyTicket) -> bool {
    ticket.0 & MARK != 0
}

impl Domain {
    /// Starts one.
    pub(super) fn start_imported(
        &self,
        from: &[ImportedRun<'_>],
        regions: &[Arc<Region>],
        segments: &[Segment],
    ) -> Result<CopyTicket> {
        let share = self.share.as_ref().ok_or_else(|| {
            Error::new(ErrorKind::Internal, "a copy of imported memory")
                .because("cuda.share is off: nothing is imported")
        })?;
        let mut used: Vec<(*const (), Use)> = Vec::new();
        let mut sources = Vec::with_capacity(from.len());
        for run in from.iter().filter(|run| run.length > 0) {
            let region_length = run.region.length();
            if run.offset.checked_add(run.length).is_none_or(|end| end > region_length) {
                return Err(Error::new(
                    ErrorKind::OutOfBounds,
                    format!("{} bytes at offset {}", run.length, run.offset),
                )
                .at(format!("an imported region of {region_length} bytes"))
                .remedy("keep offset plus length inside the region"));
            }
            // Mostly the same as before.
            let name = Arc::as_ptr(run.region).cast::<()>();
            let address = match used.iter().rev().find(|(known, _)| *known == name) {
                Some((_, known)) => known.address(),
                None => {
                    let new = share.begin(run.region, self.facts.ordinal)?;
                    let address = new.address();
                    used.push((name, new));
                    address
                }
            };
            sources.push((address + run.offset, run.length));
        }
        let mut bytes = 0;
        // The device has the other memory's addresses as they are.
        let ticket = self.copier.start(Direction::In, Some(0), |pieces| {
            self.zip(&sources, regions, segments, pieces)?;
            bytes = pieces.iter().map(|piece| piece.length).sum();
            Ok::<(), Error>(())
        })?;
        let used = used.into_iter().map(|(_, used)| used).collect();
        self.imports.under_way.lock().insert(ticket.0, used);
        self.imports.copies.fetch_add(1, Ordering::Relaxed);
        self.imports.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(CopyTicket(ticket.0 | MARK))
    }

    /// Lists a copy's pieces. What lies next to each other on both sides is one.
    fn zip(
        &self,
        sources: &[(u64, u64)],
        regions: &[Arc<Region>],
        segments: &[Segment],
        pieces: &mut Vec<Piece>,
    ) -> Result<()> {
        let unequal = || {
            let all =
                |lengths: &mut dyn Iterator<Item = u64>| lengths.fold(0u128, |sum, length| sum + u128::from(length));
            let from = all(&mut sources.iter().map(|(_, length)| *length));
            let to = all(&mut segments.iter().map(|segment| segment.length));
            Error::new(ErrorKind::OutOfBounds, "a copy of imported memory")
                .at(&*self.name)
                .because(format!("{from} bytes are to be copied to {to}"))
        };
        let mut sources = sources.iter().copied();
        let (mut from, mut left) = (0, 0);
        for segment in segments {
            let region = self.part(regions, segment)?;
            let (mut device, mut wanted) = (region.address() + segment.offset, segment.length);
            while wanted > 0 {
                if left == 0 {
                    (from, left) = sources.next().ok_or_else(unequal)?;
                }
                let length = wanted.min(left);
                match pieces.last_mut() {
                    Some(last) if last.device + last.length == device && last.staging + last.length == from => {
                        last.length += length;
                    }
                    _ => pieces.push(Piece {
                        device,
                        staging: from,
                        length,
                    }),
                }
                (device, wanted) = (device + length, wanted - length);
                (from, left) = (from + length, left - length);
            }
        }
        match left == 0 && sources.next().is_none() {
            true => Ok(()),
            false => Err(unequal()),
        }
    }

    /// How one stands. Once it has ended, what it copied from may be unmapped.
    pub(super) fn poll_imported(&self, ticket: CopyTicket) -> Result<CopyState> {
        let own = ticket.0 & !MARK;
        let state = self.copier.poll(CopyTicket(own));
        if !matches!(state, Ok(CopyState::Running)) {
            let used = self.imports.under_way.lock().remove(&own);
            drop(used);
        }
        Ok(state?)
    }
}

//! From addresses to bytes: what work on a device reads and writes, checked as a device checks it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::sys::CUresult;

use super::map::{Kind, Map, Place, Range};
use crate::context::Context;
use crate::driver::{Answer, Driver};

/// Who touches memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    /// The driver's copies, which reach all devices and any host memory.
    Copy,
    /// A kernel or a memory operation of a stream, which reach what is mapped for their device.
    Kernel,
    /// The test.
    Test,
}

/// A run of bytes, in one range.
#[derive(Debug)]
pub(crate) struct Span {
    /// Null: plain memory at `address`.
    range: Option<Arc<Range>>,
    address: u64,
    /// Bytes.
    pub(crate) length: usize,
}

impl Span {
    fn pointer(&self) -> *mut u8 {
        let known = self.range.as_ref();
        let device = known.and_then(|range| {
            let (backing, offset) = range.backing()?;
            Some(backing.pointer(offset + self.address - range.start))
        });
        device.unwrap_or(self.address as *mut u8)
    }

    /// Whether it is host memory that nobody has page-locked.
    pub(crate) fn is_pageable(&self) -> bool {
        self.range.is_none()
    }

    /// Whether the CPU may touch it too.
    pub(crate) fn is_host(&self) -> bool {
        self.range.as_ref().is_none_or(|range| range.is_host())
    }

    /// Writes with `write`, wherever the bytes go.
    fn write(&self, write: impl Fn(*mut u8)) {
        match self.range.as_ref().and_then(|range| Some((range, range.backing()?))) {
            Some((range, (backing, offset))) => backing.write(offset + self.address - range.start, write),
            None => write(self.address as *mut u8),
        }
    }

    /// Takes the bytes of another span, as long.
    pub(crate) fn copy_from(&self, source: &Span) {
        let from = source.pointer();
        // SAFETY: both are mapped for their length: resolved just now, and kept by their ranges or their owner.
        self.write(|to| unsafe { std::ptr::copy(from, to, self.length) });
    }

    /// Takes bytes, as many.
    pub(crate) fn put(&self, bytes: &[u8]) {
        debug_assert_eq!(bytes.len(), self.length);
        // SAFETY: as in `copy_from`; the bytes are no memory of the driver's.
        self.write(|to| unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, self.length) });
    }

    /// Gives the bytes, as many.
    pub(crate) fn get(&self, bytes: &mut [u8]) {
        debug_assert_eq!(bytes.len(), self.length);
        // SAFETY: as in `put`.
        unsafe { std::ptr::copy_nonoverlapping(self.pointer(), bytes.as_mut_ptr(), self.length) };
    }

    /// Writes one word of 4 or 8 bytes at once.
    pub(crate) fn put_word(&self, value: u64) {
        use std::sync::atomic::{AtomicU32, AtomicU64};
        self.write(|to| match self.length {
            // SAFETY: mapped, aligned as the caller checked, and only touched atomically by whoever waits for it.
            4 => unsafe { AtomicU32::from_ptr(to.cast()) }.store(value as u32, Ordering::Release),
            // SAFETY: as above.
            _ => unsafe { AtomicU64::from_ptr(to.cast()) }.store(value, Ordering::Release),
        });
    }

    /// Reads one word of 4 or 8 bytes at once.
    pub(crate) fn word(&self) -> u64 {
        use std::sync::atomic::{AtomicU32, AtomicU64};
        match self.length {
            // SAFETY: as in `put_word`.
            4 => u64::from(unsafe { AtomicU32::from_ptr(self.pointer().cast()) }.load(Ordering::Acquire)),
            // SAFETY: as in `put_word`.
            _ => unsafe { AtomicU64::from_ptr(self.pointer().cast()) }.load(Ordering::Acquire),
        }
    }

    /// Its first bytes, and the rest.
    pub(crate) fn split(&self, at: usize) -> (Span, Span) {
        let part = |from: usize, length: usize| Span {
            range: self.range.clone(),
            address: self.address + from as u64,
            length,
        };
        (part(0, at), part(at, self.length - at))
    }
}

/// Finds runs quickly where they follow each other in the same ranges.
pub(crate) struct Finder<'a> {
    driver: &'a Driver,
    context: Option<&'a Context>,
    who: Who,
    last: Option<Arc<Range>>,
}

impl<'a> Finder<'a> {
    /// For work of a context.
    pub(crate) fn new(driver: &'a Driver, context: &'a Context, who: Who) -> Finder<'a> {
        Finder {
            driver,
            context: Some(context),
            who,
            last: None,
        }
    }

    /// For the test, which may touch everything.
    pub(crate) fn for_test(driver: &'a Driver) -> Finder<'a> {
        Finder {
            driver,
            context: None,
            who: Who::Test,
            last: None,
        }
    }

    /// The run's spans, in order.
    pub(crate) fn spans(&mut self, map: &Map, address: u64, length: u64) -> Answer<Vec<Span>> {
        let mut spans = Vec::with_capacity(1);
        let end = address.checked_add(length).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let mut next = address;
        while next < end {
            let span = self.first(map, next, end - next)?;
            next += span.length as u64;
            spans.push(span);
        }
        Ok(spans)
    }

    /// The run's only span: a run that may not cross ranges.
    pub(crate) fn one(&mut self, map: &Map, address: u64, length: u64) -> Answer<Span> {
        let span = self.first(map, address, length)?;
        if span.length as u64 == length {
            Ok(span)
        } else {
            Err(CUresult::CUDA_ERROR_INVALID_VALUE)
        }
    }

    fn first(&mut self, map: &Map, address: u64, most: u64) -> Answer<Span> {
        let known = self.last.as_ref();
        if let Some(range) = known.filter(|range| range.start <= address && address < range.end()) {
            return Ok(span(Some(range.clone()), address, most));
        }
        match map.place(address) {
            Place::Known(range) => {
                self.check(&range)?;
                self.last = Some(range.clone());
                Ok(span(Some(range), address, most))
            }
            Place::Freed => {
                let what = format!("{:?} of {most} bytes at {address:#x}, which was freed", self.who);
                self.driver.checker.violation(&what);
                Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
            }
            Place::Unknown if self.who == Who::Copy && address >= 1 << 16 => Ok(span(None, address, most)),
            Place::Unknown | Place::Empty => Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS),
        }
    }

    fn check(&self, range: &Range) -> Answer {
        let Some(context) = self.context else {
            return Ok(());
        };
        let reachable = match &range.kind {
            Kind::Mapping { access, .. } => access.lock().get(&context.device).is_some_and(|flags| *flags == 3),
            Kind::Device { .. } | Kind::Pool { .. } | Kind::Imported { .. } => {
                self.who == Who::Copy || range.device == context.device || context.reaches(range.device)
            }
            Kind::HostAllocated { .. } | Kind::HostRegistered { .. } | Kind::Managed => true,
        };
        if reachable {
            return Ok(());
        }
        let what = format!(
            "work on device {} touches memory of device {} at {:#x}, to which it has no access",
            context.device, range.device, range.start
        );
        self.driver.checker.violation(&what);
        Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
    }
}

fn span(range: Option<Arc<Range>>, address: u64, most: u64) -> Span {
    let length = range.as_ref().map_or(most, |range| most.min(range.end() - address));
    Span {
        range,
        address,
        length: length as usize,
    }
}

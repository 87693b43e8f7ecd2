//! What memory that is not the host's asks of a link: to be looked at before it is used, and to be told of what devices
//! have written.

use std::sync::Arc;

use kvxfer_core::Result;
use kvxfer_core::flow::ByteStream;
use kvxfer_core::memory::{HostMemory, Region, Segment};
use kvxfer_core::mutants::{self, Mutant};

/// Segments looked at at once.
const SEGMENTS_MAX: usize = 256;

/// Whether all of these regions are host memory, which asks for nothing.
pub(crate) fn is_plain<'a>(regions: impl IntoIterator<Item = &'a Arc<Region>>) -> bool {
    let is_host = |region: &Arc<Region>| region.domain().name() == HostMemory::NAME;
    regions.into_iter().all(is_host)
}

/// Looks whether all of these regions still are the memory that they were made of.
///
/// # Errors
/// The domain's.
pub(crate) fn verify<'a>(regions: impl IntoIterator<Item = &'a Arc<Region>>) -> Result<()> {
    if mutants::is(Mutant::SkipVerify) {
        return Ok(());
    }
    let mut regions = regions.into_iter();
    regions.try_for_each(|region| region.domain().verify(region))
}

/// Makes what devices have written into these regions visible.
///
/// # Errors
/// The domain's: the bytes do not count then, and their memory is not given back.
pub(crate) fn settle<'a>(regions: impl IntoIterator<Item = &'a Arc<Region>>) -> Result<()> {
    if mutants::is(Mutant::SkipSettle) {
        return Ok(());
    }
    let mut regions = regions.into_iter();
    regions.try_for_each(|region| region.domain().settle_writes(region))
}

/// Regions that ranges of streams touch.
pub(crate) struct Touched {
    by_index: Vec<bool>,
    segments: Vec<Segment>,
}

impl Touched {
    pub(crate) fn new(regions: usize) -> Touched {
        Touched {
            by_index: vec![false; regions],
            segments: Vec::with_capacity(SEGMENTS_MAX),
        }
    }

    /// Adds a range of a stream.
    pub(crate) fn add(&mut self, stream: &dyn ByteStream, offset: u64, length: u32) {
        let (mut at, end) = (offset, offset + u64::from(length));
        while at < end {
            self.segments.clear();
            let got = stream.segments(at, end - at, SEGMENTS_MAX, &mut self.segments);
            if got == 0 {
                return;
            }
            at += got;
            for segment in &self.segments {
                if let Some(touched) = self.by_index.get_mut(segment.region as usize) {
                    *touched = true;
                }
            }
        }
    }

    /// Makes what devices have written into them visible.
    ///
    /// # Errors
    /// The domain's.
    pub(crate) fn settle(&self, regions: &[Arc<Region>]) -> Result<()> {
        let touched = regions.iter().zip(&self.by_index).filter(|(_, touched)| **touched);
        settle(touched.map(|(region, _)| region))
    }
}

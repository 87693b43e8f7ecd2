//! How tests paint memory and look at it: at once and past the copies under test, where whoever made the memory knows a
//! way; else by the domain's slow path.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use kvxfer_core::memory::Region;
use kvxfer_core::{Error, ErrorKind, Result};
use parking_lot::RwLock;

/// Reaches memory that is not the host's without any of the code under test.
pub trait Direct: Send + Sync {
    /// Writes bytes at an address.
    ///
    /// # Errors
    /// There is no such memory.
    fn put(&self, address: u64, bytes: &[u8]) -> io::Result<()>;

    /// Reads bytes at an address.
    ///
    /// # Errors
    /// There is no such memory.
    fn get(&self, address: u64, bytes: &mut [u8]) -> io::Result<()>;
}

type Ways = BTreeMap<u64, (u64, Arc<dyn Direct>)>;

/// By the memory's first address; with its length.
static KNOWN: RwLock<Ways> = RwLock::new(BTreeMap::new());

/// Memory that is reached directly until this is dropped, which comes before the memory is given back.
#[derive(Debug)]
pub struct Known(u64);

impl Known {
    /// So many bytes from this address on: addresses that this process uses for nothing else.
    pub fn new(address: u64, bytes: u64, direct: Arc<dyn Direct>) -> Known {
        KNOWN.write().insert(address, (bytes, direct));
        Known(address)
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        KNOWN.write().remove(&self.0);
    }
}

fn known(region: &Region) -> Option<Arc<dyn Direct>> {
    let address = region.address();
    let known = KNOWN.read();
    let (start, (length, direct)) = known.range(..=address).next_back()?;
    (address + region.length() <= start + length).then(|| direct.clone())
}

/// Writes bytes into a region.
///
/// # Errors
/// `OutOfBounds`, or the domain's.
pub fn put(region: &Region, offset: u64, bytes: &[u8]) -> Result<()> {
    let Some(direct) = known(region) else {
        return region.copy_in(offset, bytes);
    };
    region.check(offset, bytes.len() as u64)?;
    direct.put(region.address() + offset, bytes).map_err(failed)
}

/// Reads bytes out of a region.
///
/// # Errors
/// `OutOfBounds`, or the domain's.
pub fn get(region: &Region, offset: u64, bytes: &mut [u8]) -> Result<()> {
    let Some(direct) = known(region) else {
        return region.copy_out(offset, bytes);
    };
    region.check(offset, bytes.len() as u64)?;
    direct.get(region.address() + offset, bytes).map_err(failed)
}

fn failed(error: io::Error) -> Error {
    Error::new(ErrorKind::Internal, "a test's look at memory").because(error.to_string())
}

//! Page-locked host memory: the driver's own, and the transports' staging buffers.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::context::Primary;
use crate::driver::{Code, Refused};

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`; the same bits for registering.
const PORTABLE_MAPPED: u32 = 1 | 2;

/// Bytes that are page-locked for us now.
pub(crate) type PinnedBytes = Arc<AtomicU64>;

/// Page-locked memory of the driver's, seen by the host and by all devices.
#[derive(Debug)]
pub(crate) struct PinnedBlock {
    primary: Arc<Primary>,
    host: NonNull<u8>,
    device: u64,
    length: usize,
    counted: PinnedBytes,
    kept: AtomicBool,
}

// SAFETY: plain memory that this value owns; what is shared in it is shared through atomics or raw copies.
unsafe impl Send for PinnedBlock {}
// SAFETY: as above.
unsafe impl Sync for PinnedBlock {}

impl PinnedBlock {
    /// Allocates zeroed memory.
    pub(crate) fn allocate(
        primary: &Arc<Primary>,
        length: usize,
        counted: &PinnedBytes,
    ) -> Result<PinnedBlock, Refused> {
        let driver = primary.driver();
        let _current = primary.enter()?;
        let mut pointer: *mut c_void = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        unsafe { driver.host_alloc(&mut pointer, length, PORTABLE_MAPPED) }?;
        let mut device = 0;
        // SAFETY: writes one integer; the pointer is the one that was just allocated.
        let seen = unsafe { driver.host_device_pointer(&mut device, pointer, 0) };
        let host = match (seen, NonNull::new(pointer.cast::<u8>())) {
            (Ok(()), Some(host)) => host,
            (seen, _) => {
                // SAFETY: allocated above; nobody else knows it.
                let _ = unsafe { driver.host_free(pointer) };
                return Err(seen.err().unwrap_or(Refused {
                    call: "cuMemHostAlloc",
                    code: Code::OUT_OF_MEMORY,
                }));
            }
        };
        // SAFETY: the driver gave `length` bytes at `host`, and nobody else has seen them.
        unsafe { std::ptr::write_bytes(host.as_ptr(), 0, length) };
        counted.fetch_add(length as u64, Ordering::Relaxed);
        Ok(PinnedBlock {
            primary: Arc::clone(primary),
            host,
            device,
            length,
            counted: Arc::clone(counted),
            kept: AtomicBool::new(false),
        })
    }

    /// The context that it was allocated in.
    pub(crate) fn primary(&self) -> &Arc<Primary> {
        &self.primary
    }

    /// Where the host sees it.
    pub(crate) fn host(&self) -> *mut u8 {
        self.host.as_ptr()
    }

    /// Where devices see it.
    pub(crate) fn device(&self) -> u64 {
        self.device
    }

    /// Bytes.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Leaves it allocated for good: a device that is lost may still use it.
    pub(crate) fn keep(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }

    /// A word of 32 bits in it, which the device or the host may write at any time.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.length);
        // SAFETY: inside the block (just checked), aligned (the driver aligns to pages), and only ever used as an atomic.
        unsafe { AtomicU32::from_ptr(self.host.as_ptr().add(offset).cast()) }
    }
}

impl Drop for PinnedBlock {
    fn drop(&mut self) {
        if *self.kept.get_mut() {
            return;
        }
        self.counted.fetch_sub(self.length as u64, Ordering::Relaxed);
        let freed = self.primary.enter_to_give_back().and_then(|_current| {
            // SAFETY: allocated by `allocate`, freed once. Who owns the block keeps it while the device may use it.
            unsafe { self.primary.driver().host_free(self.host.as_ptr().cast()) }
        });
        if let Err(refused) = freed {
            tracing::warn!(%refused, bytes = self.length, "page-locked memory was not freed");
        }
    }
}

/// The staging buffers that are page-locked for a [`Cuda`](crate::Cuda)'s devices, by address.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    entries: Mutex<BTreeMap<u64, Entry>>,
    bytes: PinnedBytes,
}

#[derive(Debug)]
struct Entry {
    registered: Registered,
    /// Per device (ordinal): where it sees the buffer, and how many guards it has.
    aliases: Vec<Alias>,
}

#[derive(Debug)]
struct Alias {
    ordinal: i32,
    device: u64,
    guards: usize,
}

/// Memory of a caller's that is page-locked.
#[derive(Debug)]
struct Registered {
    primary: Arc<Primary>,
    base: u64,
    length: u64,
}

impl Registered {
    /// Page-locks memory; `None` if somebody else did. The context is current.
    ///
    /// # Safety
    /// The memory lives for as long as the value.
    unsafe fn new(primary: &Arc<Primary>, base: u64, length: u64) -> Result<Option<Registered>, Refused> {
        // SAFETY: the caller vouches for the memory.
        match unsafe {
            primary
                .driver()
                .host_register(base as *mut c_void, length as usize, PORTABLE_MAPPED)
        } {
            Ok(()) => Ok(Some(Registered {
                primary: Arc::clone(primary),
                base,
                length,
            })),
            Err(refused) if refused.code == Code::HOST_MEMORY_ALREADY_REGISTERED => Ok(None),
            Err(refused) => Err(refused),
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let undone = self.primary.enter_to_give_back().and_then(|_current| {
            // SAFETY: registered by `Pins::pin`, undone once.
            unsafe { self.primary.driver().host_unregister(self.base as *mut c_void) }
        });
        if let Err(refused) = undone {
            tracing::warn!(%refused, bytes = self.length, "a staging buffer stays page-locked");
        }
    }
}

/// Keeps a staging buffer page-locked.
pub(crate) struct Pin {
    pins: Arc<Pins>,
    base: u64,
    ordinal: i32,
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.pins.unpin(self.base, self.ordinal);
    }
}

impl Pins {
    /// How many bytes are page-locked, staging and our own.
    pub(crate) fn bytes(&self) -> &PinnedBytes {
        &self.bytes
    }

    /// Page-locks a buffer for a device. `None`: somebody else page-locked it already, so that only the driver's own
    /// copies may be used with it (he may undo it at any time).
    ///
    /// # Safety
    /// The buffer lives until the pin is dropped.
    pub(crate) unsafe fn pin(
        self: &Arc<Pins>,
        primary: &Arc<Primary>,
        ordinal: i32,
        base: u64,
        length: u64,
    ) -> Result<Option<Pin>, Refused> {
        let mut entries = self.entries.lock();
        let pin = || Pin {
            pins: Arc::clone(self),
            base,
            ordinal,
        };
        let known = entries.get_mut(&base).filter(|entry| entry.registered.length == length);
        if let Some(entry) = known {
            if let Some(alias) = entry.aliases.iter_mut().find(|alias| alias.ordinal == ordinal) {
                alias.guards += 1;
                return Ok(Some(pin()));
            }
            let _current = primary.enter()?;
            entry.aliases.push(Alias {
                ordinal,
                device: device_address(primary, base)?,
                guards: 1,
            });
            return Ok(Some(pin()));
        }
        let _current = primary.enter()?;
        // SAFETY: the caller vouches for the buffer.
        let Some(registered) = (unsafe { Registered::new(primary, base, length) })? else {
            return Ok(None);
        };
        let alias = Alias {
            ordinal,
            device: device_address(primary, base)?,
            guards: 1,
        };
        self.bytes.fetch_add(length, Ordering::Relaxed);
        entries.insert(
            base,
            Entry {
                registered,
                aliases: vec![alias],
            },
        );
        Ok(Some(pin()))
    }

    fn unpin(&self, base: u64, ordinal: i32) {
        let mut entries = self.entries.lock();
        let Some(entry) = entries.get_mut(&base) else {
            return;
        };
        if let Some(alias) = entry.aliases.iter_mut().find(|alias| alias.ordinal == ordinal) {
            alias.guards -= 1;
        }
        entry.aliases.retain(|alias| alias.guards > 0);
        if entry.aliases.is_empty() {
            self.bytes.fetch_sub(entry.registered.length, Ordering::Relaxed);
            // Undone under the lock: a buffer at the same address must not be locked before.
            entries.remove(&base);
        }
    }

    /// What is to be added (wrapping) to a host address in the buffer to get the device's; `None` if it is not
    /// page-locked by us for that device.
    pub(crate) fn to_device(&self, ordinal: i32, base: u64, length: u64) -> Option<u64> {
        let entries = self.entries.lock();
        let (start, entry) = entries.range(..=base).next_back()?;
        let inside = base.checked_add(length)? <= start + entry.registered.length;
        let alias = entry.aliases.iter().find(|alias| alias.ordinal == ordinal)?;
        inside.then(|| alias.device.wrapping_sub(*start))
    }
}

/// Where the device sees page-locked memory. Its context is current.
fn device_address(primary: &Primary, base: u64) -> Result<u64, Refused> {
    let mut device = 0;
    // SAFETY: writes one integer; the address is only looked up.
    unsafe {
        primary
            .driver()
            .host_device_pointer(&mut device, base as *mut c_void, 0)
    }?;
    Ok(device)
}

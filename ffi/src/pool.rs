//! Pools: memory with a layout.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvxfer::cuda::PointerKind;
use kvxfer::memory::HostMemory;
use kvxfer::{Endpoint, Error, ErrorKind, Pool, Region, Result, Role};

use crate::call::{call, releasing};
use crate::endpoint::kvx_endpoint;
use crate::input::{self, grows, no_such};
use crate::layout::{Layout, beyond, kvx_layout};
use crate::output::{Out, OutStruct, OutStructs};
use crate::status::kvx_status;
use crate::table;

/// Memory with a layout, known to an endpoint's transports and told to its peers. Freed by kvx_pool_free.
pub type kvx_pool = u64;

/// What peers may do with a pool.
pub type kvx_role = u32;
/// Be sent its blocks: offers, pushes from it, grants to read.
pub const KVX_ROLE_SERVE: kvx_role = 1;
/// Write into its blocks where a claim or grant says so.
pub const KVX_ROLE_RECEIVE: kvx_role = 2;
/// Both.
pub const KVX_ROLE_BOTH: kvx_role = 3;

/// The kind of memory a region is in.
pub type kvx_memory = u32;
/// Memory that the CPU can read and write.
pub const KVX_MEMORY_HOST: kvx_memory = 0;
/// Memory of a CUDA device: KVX_ERR_UNSUPPORTED without a driver that can be used.
pub const KVX_MEMORY_DEVICE: kvx_memory = 1;

/// Told once when the library has let go of a region's memory: it may be freed or unmapped then. Called on any thread,
/// perhaps while a lock is held: it must return soon, must not throw, and every kvx_ call from inside it is refused.
pub type kvx_release = Option<unsafe extern "C" fn(data: *mut c_void)>;

/// A contiguous range of the application's memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_region_spec {
    /// sizeof(kvx_region_spec), the same in every element.
    pub struct_size: u32,
    /// The kind of memory.
    pub memory: kvx_memory,
    /// First byte.
    pub address: *mut c_void,
    /// Bytes.
    pub length: u64,
    /// Told when the memory is let go; null: nobody. Not called if the call that registers it fails.
    pub release: kvx_release,
    /// Passed to release.
    pub release_data: *mut c_void,
    /// Of memory of a device: one more than the number that CUDA has for the device in this process, if it is to be
    /// checked; 0: whichever device the memory is of.
    pub device: u32,
    /// 0.
    pub reserved: u32,
}
grows!(kvx_region_spec, 48);

/// A region of a pool.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_region_info {
    /// Set by the library or the caller, as the function says.
    pub struct_size: u32,
    /// The kind of memory.
    pub memory: kvx_memory,
    /// First byte.
    pub address: *mut c_void,
    /// Bytes.
    pub length: u64,
}
grows!(kvx_region_info, 24);

/// Makes memory of the application's known as a pool: one region for each that the layout declares, in its order.
/// From now until release is called (or, without one, until every handle on the pool has ended and the pool is closed or
/// freed) the memory must stay where it is. Blocks that a handle names must not be written (or, at the receiver, read)
/// until that handle has ended; after KVX_DESTINATION_QUARANTINED they must not be reused at all.
/// If this fails, nothing was kept, and release is not called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_pool_register(
    endpoint: kvx_endpoint,
    layout: kvx_layout,
    regions: *const kvx_region_spec,
    region_count: usize,
    role: kvx_role,
    pool: *mut kvx_pool,
) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, specs) = unsafe { (Out::handle("pool", pool)?, input::structs(regions, region_count)?) };
        let (endpoint, layout) = (table::get::<Endpoint>(endpoint)?, table::get::<Layout>(layout)?);
        let role = role_of(role)?;
        if specs.iter().any(|spec| spec.memory == KVX_MEMORY_DEVICE) {
            // Without a driver it is no region's fault.
            endpoint.cuda()?;
        }
        let registered = Arc::new(AtomicBool::new(false));
        let mut memory = Vec::with_capacity(specs.len());
        for (index, spec) in specs.iter().enumerate() {
            memory.push(region(&endpoint, spec, &registered).map_err(|error| error.at(format!("region {index}")))?);
        }
        // SAFETY: what the memory must be is the caller's word, as the header says.
        let made = unsafe { endpoint.register((*layout.0).clone(), memory, role)? };
        let handle = table::insert(made)?;
        // Only now: what was refused above let go of memory that it never had.
        registered.store(true, Ordering::Release);
        out.put(handle);
        Ok(())
    })
}

/// A pool in zeroed host memory of the library's own, of the sizes that the layout declares.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_pool_allocate(
    endpoint: kvx_endpoint,
    layout: kvx_layout,
    role: kvx_role,
    pool: *mut kvx_pool,
) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointer, as the crate's contract says.
        let out = unsafe { Out::handle("pool", pool)? };
        let (endpoint, layout) = (table::get::<Endpoint>(endpoint)?, table::get::<Layout>(layout)?);
        out.put(table::insert(endpoint.allocate((*layout.0).clone(), role_of(role)?)?)?);
        Ok(())
    })
}

/// Its layout: a new layout handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_pool_layout(pool: kvx_pool, layout: *mut kvx_layout) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointer, as the crate's contract says.
        let out = unsafe { Out::handle("layout", layout)? };
        let pool = table::get::<Pool>(pool)?;
        out.put(table::insert(Layout(Arc::clone(pool.layout())))?);
        Ok(())
    })
}

/// Where a region of it is. The caller sets struct_size. Blocks that a handle names must not be touched there until it
/// has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_pool_region(pool: kvx_pool, region: u32, info: *mut kvx_region_info) -> kvx_status {
    call(|| {
        let pool = table::get::<Pool>(pool)?;
        // SAFETY: the caller's struct, as the crate's contract says.
        let out = unsafe { OutStruct::new(info)? };
        let regions = pool.regions();
        let found = regions.get(region as usize);
        out.put(described(found.ok_or_else(|| beyond("region", region, regions.len()))?));
        Ok(())
    })
}

/// Where all regions of it are: at most capacity elements of element_size bytes (sizeof(kvx_region_info)), and in count
/// how many there are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_pool_regions(
    pool: kvx_pool,
    regions: *mut kvx_region_info,
    element_size: usize,
    capacity: usize,
    count: *mut usize,
) -> kvx_status {
    call(|| {
        let pool = table::get::<Pool>(pool)?;
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, total) = unsafe {
            (
                OutStructs::new(regions, element_size, capacity)?,
                Out::new("count", count)?,
            )
        };
        for (index, region) in pool.regions().iter().enumerate().take(out.capacity()) {
            out.put(index, described(region));
        }
        total.put(pool.regions().len());
        Ok(())
    })
}

/// The number that peers know it by, and its role. Null where it is not wanted.
/// KVX_ERR_NOT_REGISTERED while it is suspended, KVX_ERR_CLOSED after its end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_pool_id(pool: kvx_pool, id: *mut u32, role: *mut kvx_role) -> kvx_status {
    call(|| {
        let pool = table::get::<Pool>(pool)?;
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (id_out, role_out) = unsafe {
            let id_out = (!id.is_null()).then(|| Out::new("id", id)).transpose()?;
            let role_out = (!role.is_null()).then(|| Out::new("role", role)).transpose()?;
            (id_out, role_out)
        };
        if let Some(out) = role_out {
            out.put(match pool.role() {
                Role::Serve => KVX_ROLE_SERVE,
                Role::Receive => KVX_ROLE_RECEIVE,
                Role::Both => KVX_ROLE_BOTH,
            });
        }
        let number = pool.id()?;
        if let Some(out) = id_out {
            out.put(number.0);
        }
        Ok(())
    })
}

/// Copies bytes into a block of a plane, from offset on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_pool_copy_in(
    pool: kvx_pool,
    plane: u32,
    block: u32,
    offset: u32,
    bytes: *const c_void,
    length: usize,
) -> kvx_status {
    call(|| {
        let pool = table::get::<Pool>(pool)?;
        // SAFETY: the caller's bytes, as the crate's contract says.
        let bytes = unsafe { input::bytes("bytes", bytes, length)? };
        pool.copy_in(plane, block, offset, bytes)
    })
}

/// Copies bytes of a block of a plane out, from offset on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_pool_copy_out(
    pool: kvx_pool,
    plane: u32,
    block: u32,
    offset: u32,
    bytes: *mut c_void,
    length: usize,
) -> kvx_status {
    call(|| {
        let pool = table::get::<Pool>(pool)?;
        input::check_array("bytes", bytes.cast::<u8>(), length)?;
        let bytes = match length {
            0 => &mut [],
            // SAFETY: checked above; writable for the call, as the crate's contract says. It may be uninitialised, and
            // is only written.
            _ => unsafe { std::slice::from_raw_parts_mut(bytes.cast::<u8>(), length) },
        };
        pool.copy_out(plane, block, offset, bytes)
    })
}

/// Takes the pool out of use. The handle stays, to be freed.
/// KVX_ERR_BUSY while a handle or a kept verdict refers to it; it stays usable then. KVX_ERR_BUSY also while other
/// endpoints on this host have its GPU memory mapped: it is out of use then, they have been told to let go, and the memory
/// must stay until another call says KVX_OK (mostly within milliseconds).
#[unsafe(no_mangle)]
pub extern "C" fn kvx_pool_close(pool: kvx_pool) -> kvx_status {
    call(|| table::get::<Pool>(pool)?.close())
}

/// As kvx_pool_close, waiting for what refers to the pool to end. May block, up to timeout_ms.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_pool_close_wait(pool: kvx_pool, timeout_ms: u64) -> kvx_status {
    call(|| table::get::<Pool>(pool)?.close_wait(input::timeout(timeout_ms)))
}

/// Takes the pool out of use for a while, so that its memory may be remapped: until kvx_pool_resume nothing of it is read
/// or written. KVX_ERR_BUSY while a handle refers to it, and while other endpoints on this host have its GPU memory mapped, as
/// with kvx_pool_close: call it again then.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_pool_suspend(pool: kvx_pool) -> kvx_status {
    call(|| table::get::<Pool>(pool)?.suspend())
}

/// Puts a suspended pool into use again, with the same layout at the same addresses.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_pool_resume(pool: kvx_pool) -> kvx_status {
    call(|| table::get::<Pool>(pool)?.resume())
}

/// Frees the handle, at once. The pool itself goes, and release is called, once no open handle refers to it.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_pool_free(pool: kvx_pool) -> kvx_status {
    call(|| table::remove::<Pool>(pool).map(drop))
}

fn described(region: &Region) -> kvx_region_info {
    kvx_region_info {
        struct_size: 0,
        memory: match region.host_view(0, region.length()) {
            Some(_) => KVX_MEMORY_HOST,
            None => KVX_MEMORY_DEVICE,
        },
        address: region.address() as *mut c_void,
        length: region.length(),
    }
}

fn role_of(role: kvx_role) -> Result<Role> {
    match role {
        KVX_ROLE_SERVE => Ok(Role::Serve),
        KVX_ROLE_RECEIVE => Ok(Role::Receive),
        KVX_ROLE_BOTH => Ok(Role::Both),
        other => Err(no_such("role", other)),
    }
}

/// What is told when a region's memory is let go. Dropped with the region.
struct Release {
    callback: kvx_release,
    data: *mut c_void,
    registered: Arc<AtomicBool>,
}

// SAFETY: the data is only passed back to the callback, which the header says is called on any thread.
unsafe impl Send for Release {}
// SAFETY: no method takes `&Release`.
unsafe impl Sync for Release {}

impl Drop for Release {
    fn drop(&mut self) {
        if let Some(callback) = self.callback
            && self.registered.load(Ordering::Acquire)
        {
            // SAFETY: the caller's callback with the caller's data, once, as the header says.
            releasing(|| unsafe { callback(self.data) });
        }
    }
}

fn region(endpoint: &Endpoint, spec: &kvx_region_spec, registered: &Arc<AtomicBool>) -> Result<Arc<Region>> {
    if !matches!(spec.memory, KVX_MEMORY_HOST | KVX_MEMORY_DEVICE) {
        return Err(no_such("memory", spec.memory));
    }
    let release = Release {
        callback: spec.release,
        data: spec.release_data,
        registered: Arc::clone(registered),
    };
    let address = spec.address as u64;
    if spec.memory == KVX_MEMORY_DEVICE {
        let cuda = endpoint.cuda()?;
        if spec.device > 0
            && let PointerKind::Device { ordinal, pci } = cuda.classify(address)?.kind
            && i64::from(ordinal) + 1 != i64::from(spec.device)
        {
            return Err(
                Error::new(ErrorKind::InvalidArgument, format!("device = {}", spec.device))
                    .because(format!(
                        "the memory at {address:#x} is of device {ordinal} ({pci}), which counts as {}",
                        ordinal + 1
                    ))
                    .remedy("set device to 0, or to one more than the device's number"),
            );
        }
        // SAFETY: as below; the driver is asked what the address is.
        return unsafe { cuda.region(address, spec.length, Box::new(release)) };
    }
    // SAFETY: what the memory must be, and for how long, is the caller's word, as the header says; `release` is dropped
    // with the region.
    unsafe {
        Region::from_raw(
            spec.address.cast(),
            spec.length,
            Arc::new(HostMemory),
            Box::new(release),
        )
    }
}

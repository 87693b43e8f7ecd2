//! The table of the driver's functions: each under its symbol, with its types, how it is looked up, and a counter.
//!
//! Enumerations cross as plain integers: cudarc's are Rust enums, in which a value that a newer driver may return would
//! be undefined behaviour.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUipcMemHandle, CUmemAccessDesc, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemcpyAttributes, CUmodule, CUstream,
};

use super::code::Code;
use super::{Driver, Refused};

/// How a function is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lookup {
    /// By its symbol; without it the driver is not used.
    Required,
    /// By its symbol; what needs it is done otherwise, or not, without it.
    Optional,
    /// By name and version through `cuGetProcAddress_v2`: under one name its signature differs from version to version.
    Versioned(c_int),
}

macro_rules! functions {
    ($($(#[$doc:meta])* $lookup:ident $(($version:literal))?, $name:ident = $symbol:literal ($($argument:ident: $type:ty),* $(,)?);)*) => {
        /// The functions, in the table's order.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy)]
        enum Index { $($name,)* }

        /// Symbols and look-ups, in the table's order.
        pub(super) const FUNCTIONS: &[(&str, Lookup)] = &[$(($symbol, $lookup $(($version))?),)*];

        /// What was found: `None` is a function that this driver does not have.
        #[allow(non_snake_case)]
        pub(super) struct Table {
            $($name: Option<unsafe extern "C" fn($($type),*) -> c_uint>,)*
            counts: [AtomicU64; FUNCTIONS.len()],
        }

        impl Table {
            /// Fills the table with what `find` finds, which is asked for each symbol.
            ///
            /// # Safety
            /// What `find` returns for a symbol is null or that function of the driver's interface.
            pub(super) unsafe fn fill(mut find: impl FnMut(&'static str, Lookup) -> *mut c_void) -> Table {
                Table {
                    $($name: {
                        let address = find($symbol, $lookup $(($version))?);
                        // SAFETY: by the caller's contract the address is null (`None`) or a function with this
                        // signature; an `Option` of a function pointer has the layout of a pointer.
                        unsafe {
                            std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($type),*) -> c_uint>>(address)
                        }
                    },)*
                    counts: [const { AtomicU64::new(0) }; FUNCTIONS.len()],
                }
            }

            /// How often each function was called, in the table's order.
            pub(super) fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
                FUNCTIONS.iter().zip(&self.counts).map(|((symbol, _), count)| (*symbol, count.load(Ordering::Relaxed)))
            }
        }

        impl Driver {
            $(
                $(#[$doc])*
                ///
                /// # Safety
                /// As the driver's documentation of the function says; where it takes pointers, they are valid for it.
                #[allow(clippy::too_many_arguments)]
                pub(crate) unsafe fn $name(&self, $($argument: $type),*) -> Result<(), Refused> {
                    let Some(function) = self.table.$name else {
                        return Err(Refused { call: $symbol, code: Code::ABSENT });
                    };
                    self.table.counts[Index::$name as usize].fetch_add(1, Ordering::Relaxed);
                    // SAFETY: the caller's contract, and `Table::fill`'s for the function itself.
                    match Code(unsafe { function($($argument),*) }) {
                        Code::SUCCESS => Ok(()),
                        code => Err(Refused { call: $symbol, code }),
                    }
                }
            )*
        }
    };
}

use Lookup::{Optional, Required, Versioned};

functions! {
    /// Initialises the driver.
    Required, init = "cuInit"(flags: c_uint);
    /// The newest CUDA version that the driver supports, as 1000 times the major plus 10 times the minor number.
    Required, driver_version = "cuDriverGetVersion"(version: *mut c_int);
    /// How many devices this process sees.
    Required, device_count = "cuDeviceGetCount"(count: *mut c_int);
    /// The device with this ordinal.
    Required, device = "cuDeviceGet"(device: *mut CUdevice, ordinal: c_int);
    /// Its name.
    Required, device_name = "cuDeviceGetName"(name: *mut c_char, length: c_int, device: CUdevice);
    /// Its memory in bytes.
    Required, device_memory = "cuDeviceTotalMem_v2"(bytes: *mut usize, device: CUdevice);
    /// One of its attributes.
    Required, device_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_int, device: CUdevice);
    /// Its PCI address as text.
    Required, device_pci = "cuDeviceGetPCIBusId"(text: *mut c_char, length: c_int, device: CUdevice);

    /// Retains the device's primary context, making it if it is not there.
    Required, primary_retain = "cuDevicePrimaryCtxRetain"(context: *mut CUcontext, device: CUdevice);
    /// Releases it.
    Required, primary_release = "cuDevicePrimaryCtxRelease_v2"(device: CUdevice);
    /// Whether it is there.
    Required, primary_state = "cuDevicePrimaryCtxGetState"(device: CUdevice, flags: *mut c_uint, active: *mut c_int);
    /// Makes a context current on this thread.
    Required, context_push = "cuCtxPushCurrent_v2"(context: CUcontext);
    /// Makes the one before it current again.
    Required, context_pop = "cuCtxPopCurrent_v2"(context: *mut CUcontext);
    /// The current context, null if there is none.
    Required, context_current = "cuCtxGetCurrent"(context: *mut CUcontext);
    /// The current context's device.
    Required, context_device = "cuCtxGetDevice"(device: *mut CUdevice);
    /// Exchanges what this thread may do while a stream is captured.
    Optional, capture_mode = "cuThreadExchangeStreamCaptureMode"(mode: *mut c_uint);

    /// Several attributes of a pointer at once.
    Required, pointer_attributes = "cuPointerGetAttributes"(
        count: c_uint, attributes: *mut c_uint, data: *mut *mut c_void, pointer: CUdeviceptr);
    /// One attribute of a pointer.
    Required, pointer_attribute = "cuPointerGetAttribute"(data: *mut c_void, attribute: c_uint, pointer: CUdeviceptr);
    /// Sets an attribute of the allocation that a pointer is in.
    Optional, pointer_set = "cuPointerSetAttribute"(value: *const c_void, attribute: c_uint, pointer: CUdeviceptr);
    /// The allocation or mapping that a pointer is in.
    Required, address_range = "cuMemGetAddressRange_v2"(base: *mut CUdeviceptr, size: *mut usize, pointer: CUdeviceptr);
    /// The handle behind a mapping of virtual memory management.
    Optional, mapping_retain = "cuMemRetainAllocationHandle"(
        handle: *mut CUmemGenericAllocationHandle, address: *mut c_void);
    /// How it was made.
    Optional, mapping_properties = "cuMemGetAllocationPropertiesFromHandle"(
        properties: *mut CUmemAllocationProp, handle: CUmemGenericAllocationHandle);
    /// Gives it back.
    Optional, mapping_release = "cuMemRelease"(handle: CUmemGenericAllocationHandle);
    /// What a device may do with mapped memory.
    Optional, mapping_access = "cuMemGetAccess"(
        flags: *mut c_ulonglong, location: *const CUmemLocation, pointer: CUdeviceptr);
    /// The handle as something that another process can be given.
    Optional, mapping_export = "cuMemExportToShareableHandle"(
        shared: *mut c_void, handle: CUmemGenericAllocationHandle, kind: c_uint, flags: c_ulonglong);
    /// A handle of what another process gave.
    Optional, mapping_import = "cuMemImportFromShareableHandle"(
        handle: *mut CUmemGenericAllocationHandle, shared: *mut c_void, kind: c_uint);
    /// Addresses for mappings.
    Optional, addresses_reserve = "cuMemAddressReserve"(
        start: *mut CUdeviceptr, size: usize, alignment: usize, wanted: CUdeviceptr, flags: c_ulonglong);
    /// Gives them back.
    Optional, addresses_free = "cuMemAddressFree"(start: CUdeviceptr, size: usize);
    /// Maps memory there.
    Optional, map = "cuMemMap"(
        start: CUdeviceptr, size: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong);
    /// Undoes that.
    Optional, unmap = "cuMemUnmap"(start: CUdeviceptr, size: usize);
    /// Lets devices use what is mapped.
    Optional, mapping_allow = "cuMemSetAccess"(
        start: CUdeviceptr, size: usize, allowed: *const CUmemAccessDesc, count: usize);
    /// What another process can open an ordinary allocation by.
    Optional, allocation_handle = "cuIpcGetMemHandle"(handle: *mut CUipcMemHandle, address: CUdeviceptr);
    /// Opens another process's allocation.
    Optional, allocation_open = "cuIpcOpenMemHandle_v2"(
        address: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
    /// Closes it.
    Optional, allocation_close = "cuIpcCloseMemHandle"(address: CUdeviceptr);
    /// Whether a device can reach another's memory.
    Optional, peer_reachable = "cuDeviceCanAccessPeer"(can: *mut c_int, device: CUdevice, peer: CUdevice);
    /// Lets the current context reach another's memory.
    Optional, peer_enable = "cuCtxEnablePeerAccess"(peer: CUcontext, flags: c_uint);
    /// A dmabuf of a range.
    Optional, range_handle = "cuMemGetHandleForAddressRange"(
        handle: *mut c_void, address: CUdeviceptr, size: usize, kind: c_uint, flags: c_ulonglong);
    /// Makes what other devices wrote into this one's memory visible.
    Optional, flush_writes = "cuFlushGPUDirectRDMAWrites"(target: c_uint, scope: c_uint);

    /// Page-locked memory of the driver's.
    Required, host_alloc = "cuMemHostAlloc"(pointer: *mut *mut c_void, size: usize, flags: c_uint);
    /// Frees it.
    Required, host_free = "cuMemFreeHost"(pointer: *mut c_void);
    /// Page-locks memory of the caller's.
    Required, host_register = "cuMemHostRegister_v2"(pointer: *mut c_void, size: usize, flags: c_uint);
    /// Undoes that.
    Required, host_unregister = "cuMemHostUnregister"(pointer: *mut c_void);
    /// Where a device sees page-locked memory.
    Required, host_device_pointer = "cuMemHostGetDevicePointer_v2"(
        device: *mut CUdeviceptr, pointer: *mut c_void, flags: c_uint);

    /// A stream.
    Required, stream_create = "cuStreamCreate"(stream: *mut CUstream, flags: c_uint);
    /// Destroys it, when its work is done.
    Required, stream_destroy = "cuStreamDestroy_v2"(stream: CUstream);
    /// Whether all its work is done.
    Required, stream_query = "cuStreamQuery"(stream: CUstream);
    /// The context it belongs to.
    Required, stream_context = "cuStreamGetCtx"(stream: CUstream, context: *mut CUcontext);
    /// Whether it is being captured.
    Optional, stream_capturing = "cuStreamIsCapturing"(stream: CUstream, status: *mut c_uint);
    /// Makes later work of the stream wait for an event.
    Required, stream_wait_event = "cuStreamWaitEvent"(stream: CUstream, event: CUevent, flags: c_uint);
    /// Makes later work of the stream wait for a value in memory.
    Optional, stream_wait_value = "cuStreamWaitValue32_v2"(
        stream: CUstream, address: CUdeviceptr, value: c_uint, flags: c_uint);
    /// Writes a value to memory when the stream's earlier work is done.
    Optional, stream_write_value = "cuStreamWriteValue32_v2"(
        stream: CUstream, address: CUdeviceptr, value: c_uint, flags: c_uint);

    /// An event.
    Required, event_create = "cuEventCreate"(event: *mut CUevent, flags: c_uint);
    /// Destroys it.
    Required, event_destroy = "cuEventDestroy_v2"(event: CUevent);
    /// Makes it happen when the stream's earlier work is done.
    Required, event_record = "cuEventRecord"(event: CUevent, stream: CUstream);
    /// Whether it has happened.
    Required, event_query = "cuEventQuery"(event: CUevent);

    /// A copy between any two addresses, behind the stream's earlier work.
    Required, copy = "cuMemcpyAsync"(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
    /// Many copies in one call, in any order, behind the stream's earlier work. 13.0 has it without `failed`.
    Versioned(12080), copy_batch = "cuMemcpyBatchAsync"(
        to: *mut CUdeviceptr, from: *mut CUdeviceptr, sizes: *mut usize, count: usize,
        attributes: *mut CUmemcpyAttributes, indices: *mut usize, attribute_count: usize,
        failed: *mut usize, stream: CUstream);

    /// Loads kernels, compiling them for the current context's device.
    Optional, module_load = "cuModuleLoadData"(module: *mut CUmodule, image: *const c_void);
    /// Unloads them.
    Optional, module_unload = "cuModuleUnload"(module: CUmodule);
    /// One kernel of a module.
    Optional, module_function = "cuModuleGetFunction"(
        function: *mut CUfunction, module: CUmodule, name: *const c_char);
    /// Starts a kernel behind the stream's earlier work.
    Optional, launch = "cuLaunchKernel"(
        function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void);
}

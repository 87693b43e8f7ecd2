//! What the driver says of a pointer.

use std::sync::atomic::Ordering;

use cudarc::driver::sys::CUresult;

use super::map::{Kind, Range};
use crate::config::Defect;
use crate::driver::{Answer, Driver};

/// An attribute's value: its bytes, in the size that the attribute has.
pub(crate) enum Value {
    Byte(u8),
    Word(u32),
    Long(u64),
}

/// Attributes by number, as in `CUpointer_attribute`.
pub(crate) mod number {
    pub(crate) const CONTEXT: u32 = 1;
    pub(crate) const MEMORY_TYPE: u32 = 2;
    pub(crate) const DEVICE_POINTER: u32 = 3;
    pub(crate) const HOST_POINTER: u32 = 4;
    pub(crate) const SYNC_MEMOPS: u32 = 6;
    pub(crate) const BUFFER_ID: u32 = 7;
    pub(crate) const IS_MANAGED: u32 = 8;
    pub(crate) const DEVICE_ORDINAL: u32 = 9;
    pub(crate) const IS_LEGACY_IPC_CAPABLE: u32 = 10;
    pub(crate) const RANGE_START: u32 = 11;
    pub(crate) const RANGE_SIZE: u32 = 12;
    pub(crate) const MAPPED: u32 = 13;
    pub(crate) const HANDLE_TYPES: u32 = 14;
    pub(crate) const IS_GPUDIRECT_CAPABLE: u32 = 15;
    pub(crate) const ACCESS_FLAGS: u32 = 16;
    pub(crate) const MEMPOOL: u32 = 17;
    pub(crate) const MAPPING_SIZE: u32 = 18;
    pub(crate) const MAPPING_BASE: u32 = 19;
    pub(crate) const MEMORY_BLOCK_ID: u32 = 20;
}

const HOST: u32 = 1;
const DEVICE: u32 = 2;
const READ_WRITE: u32 = 3;

/// The attribute of an address in a range.
pub(crate) fn of(driver: &Driver, range: &Range, address: u64, attribute: u32) -> Answer<Value> {
    use number as n;
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    Ok(match attribute {
        n::CONTEXT => Value::Long(range.context as u64),
        n::MEMORY_TYPE if range.is_pinned() && !driver.has(Defect::HostTakenForDevice) => Value::Word(HOST),
        n::MEMORY_TYPE => Value::Word(DEVICE),
        n::DEVICE_POINTER => Value::Long(address),
        n::HOST_POINTER if range.is_host() => Value::Long(address),
        n::HOST_POINTER => return invalid,
        n::SYNC_MEMOPS => Value::Byte(u8::from(range.sync_memops.load(Ordering::Relaxed))),
        n::BUFFER_ID if driver.has(Defect::NoBufferId) => Value::Long(range.start),
        n::BUFFER_ID => Value::Long(range.id),
        n::IS_MANAGED => Value::Byte(u8::from(matches!(range.kind, Kind::Managed))),
        n::DEVICE_ORDINAL => Value::Word(range.device),
        n::IS_LEGACY_IPC_CAPABLE => {
            let allowed = driver.settings(range.device)?.ipc;
            Value::Byte(u8::from(allowed && matches!(range.kind, Kind::Device { .. })))
        }
        n::RANGE_START | n::MAPPING_BASE => Value::Long(range.start),
        n::RANGE_SIZE | n::MAPPING_SIZE => Value::Long(range.length),
        n::MAPPED => Value::Byte(1),
        n::HANDLE_TYPES => Value::Long(match &range.kind {
            Kind::Mapping { physical, .. } => u64::from(physical.handle_types),
            _ => 0,
        }),
        n::IS_GPUDIRECT_CAPABLE => Value::Byte(u8::from(is_gpudirect(driver, range))),
        n::ACCESS_FLAGS => Value::Word(READ_WRITE),
        n::MEMPOOL => Value::Long(match range.kind {
            Kind::Pool { pool, .. } => pool as u64,
            _ => 0,
        }),
        n::MEMORY_BLOCK_ID => Value::Long(range.id),
        _ => return invalid,
    })
}

/// What is said of an address that the driver does not know, when several attributes are asked for at once.
pub(crate) fn of_unknown(attribute: u32) -> Value {
    use number as n;
    match attribute {
        n::MEMORY_TYPE | n::ACCESS_FLAGS => Value::Word(0),
        // As the driver has it: no device.
        n::DEVICE_ORDINAL => Value::Word(-2_i32 as u32),
        n::SYNC_MEMOPS | n::IS_MANAGED | n::IS_LEGACY_IPC_CAPABLE | n::MAPPED | n::IS_GPUDIRECT_CAPABLE => {
            Value::Byte(0)
        }
        _ => Value::Long(0),
    }
}

/// Whether network devices may reach the memory.
pub(crate) fn is_gpudirect(driver: &Driver, range: &Range) -> bool {
    let supported = driver.settings(range.device).is_ok_and(|settings| settings.gpudirect);
    supported
        && match &range.kind {
            Kind::Device { .. } => true,
            Kind::Mapping { physical, .. } => physical.gpudirect,
            _ => false,
        }
}

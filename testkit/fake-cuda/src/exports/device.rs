//! Devices and their attributes.

use std::ffi::c_char;

use cudarc::driver::sys::{CUdevice_attribute_enum as Attribute, CUresult};

use super::{In, Out, device_number};
use crate::config::Settings;

driver_calls! {
    cuDeviceGetCount(count: Out<i32>) |driver| {
        count.set(driver.device_count() as i32)
    }

    cuDeviceGet(device: Out<i32>, ordinal: i32) |driver| {
        driver.settings(device_number(ordinal)?)?;
        device.set(ordinal)
    }

    cuDeviceGetName(name: Out<c_char>, length: i32, device: i32) |driver| {
        name.set_text(&driver.settings(device_number(device)?)?.name, length)
    }

    cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: i32) |driver| {
        let (domain, bus, number) = driver.settings(device_number(device)?)?.pci;
        let mut bytes = *b"kvxfer-fake-cuda";
        bytes[12..].copy_from_slice(&[domain as u8, bus as u8, number as u8, device as u8]);
        uuid.set(bytes)
    }

    cuDeviceTotalMem_v2(bytes: Out<usize>, device: i32) |driver| {
        bytes.set(driver.settings(device_number(device)?)?.memory_bytes as usize)
    }

    cuDeviceGetAttribute(value: Out<i32>, attribute: u32, device: i32) |driver| {
        let settings = driver.settings(device_number(device)?)?;
        value.set(attribute_of(&settings, attribute).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?)
    }

    cuDeviceGetPCIBusId(text: Out<c_char>, length: i32, device: i32) |driver| {
        let (domain, bus, number) = driver.settings(device_number(device)?)?.pci;
        text.set_text(&format!("{domain:04X}:{bus:02X}:{number:02X}.0"), length)
    }

    cuDeviceGetByPCIBusId(device: Out<i32>, text: In<c_char>) |driver| {
        let wanted = text.text()?.to_ascii_lowercase();
        for index in 0..driver.device_count() {
            let (domain, bus, number) = driver.settings(index)?.pci;
            if wanted == format!("{domain:04x}:{bus:02x}:{number:02x}.0") {
                return device.set(index as i32);
            }
        }
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    cuDeviceCanAccessPeer(can: Out<i32>, device: i32, peer: i32) |driver| {
        let (device, peer) = (device_number(device)?, device_number(peer)?);
        let both = driver.settings(device)?.peer && driver.settings(peer)?.peer;
        can.set(i32::from(both && device != peer))
    }

    cuDeviceGetP2PAttribute(value: Out<i32>, attribute: u32, device: i32, peer: i32) |driver| {
        const ACCESS_SUPPORTED: u32 = 2;
        let (device, peer) = (device_number(device)?, device_number(peer)?);
        if device == peer {
            return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        let both = driver.settings(device)?.peer && driver.settings(peer)?.peer;
        value.set(i32::from(both && attribute <= ACCESS_SUPPORTED))
    }
}

/// What a device answers; `None`: there is no such attribute.
fn attribute_of(settings: &Settings, attribute: u32) -> Option<i32> {
    use Attribute as A;
    if let Some((_, value)) = settings.attributes.iter().find(|(number, _)| *number == attribute) {
        return Some(*value);
    }
    // An older driver does not know the younger ones.
    if attribute == A::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED as u32 && settings.driver_version < 11_070 {
        return None;
    }
    let is = |other: A| attribute == other as u32;
    let on = [
        A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
        A::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY,
        A::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
        A::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR,
        A::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
        A::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED,
        A::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY,
        A::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
        A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
        A::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS,
        A::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED,
        A::CU_DEVICE_ATTRIBUTE_GPU_OVERLAP,
    ];
    if on.into_iter().any(is) {
        return Some(1);
    }
    let vmm = [
        A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    ];
    if vmm.into_iter().any(is) {
        return Some(i32::from(settings.vmm));
    }
    let gpudirect = i32::from(settings.gpudirect);
    let known = [
        (A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, gpudirect),
        (
            A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            gpudirect & i32::from(settings.vmm),
        ),
        (A::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, i32::from(settings.dmabuf)),
        (
            A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
            settings.flush_options,
        ),
        (
            A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING,
            settings.writes_ordering,
        ),
        (
            A::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES,
            i32::from(settings.flush_options & 2 != 0),
        ),
        (A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, settings.compute.0),
        (A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, settings.compute.1),
        (A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, settings.pci.0 as i32),
        (A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, settings.pci.1 as i32),
        (A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, settings.pci.2 as i32),
        (A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132),
        (A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024),
        (A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, i32::MAX),
        (A::CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32),
        (A::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3),
        (A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, -1),
    ];
    if let Some((_, value)) = known.into_iter().find(|(other, _)| is(*other)) {
        return Some(value);
    }
    // The others exist, and say no.
    (attribute > 0 && attribute < A::CU_DEVICE_ATTRIBUTE_MAX as u32).then_some(0)
}

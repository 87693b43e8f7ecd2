//! Memory of other processes, by legacy handles.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use cudarc::driver::sys::CUresult;
use parking_lot::Mutex;

use super::Out;
use crate::memory::backing::{self, BLOCK, Backing};
use crate::memory::map::{Kind, Place};

const MAGIC: u64 = 0x6b76_7866_6970_6331;
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;

/// `CUipcMemHandle`: 64 bytes, here eight words.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemHandle {
    magic: u64,
    process: u32,
    descriptor: u32,
    inode: u64,
    offset: u64,
    length: u64,
    device: u64,
    reserved: [u64; 2],
}

driver_calls! {
    cuIpcGetMemHandle(out: Out<MemHandle>, address: u64) |driver| {
        driver.current()?;
        let place = driver.world.lock().map.place(address);
        let range = match place {
            Place::Known(range) => range,
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        };
        // Neither VMM nor pools nor what is imported.
        let Kind::Device { backing, offset, .. } = &range.kind else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        if !driver.settings(range.device)?.ipc {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let (descriptor, inode) = backing.identity().map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
        out.set(MemHandle {
            magic: MAGIC,
            process: std::process::id(),
            descriptor: descriptor as u32,
            inode,
            offset: *offset,
            length: range.length,
            device: u64::from(range.device),
            reserved: [0; 2],
        })
    }

    cuIpcOpenMemHandle_v2(out: Out<u64>, handle: MemHandle, flags: u32) |driver| {
        let context = driver.current()?;
        if handle.magic != MAGIC || flags & !LAZY_ENABLE_PEER_ACCESS != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // Within a process the pointer itself is to be used.
        if handle.process == std::process::id() {
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        let device = handle.device as u32;
        if !driver.settings(device)?.ipc {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        if device != context.device {
            let peers = driver.settings(context.device)?.peer && driver.settings(device)?.peer;
            if !peers {
                return Err(CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
            }
            if flags & LAZY_ENABLE_PEER_ACCESS != 0 {
                context.enable_peer(device);
            }
        }
        let key = (handle.process, handle.inode);
        {
            let world = driver.world.lock();
            let known = world.imports.get(&key).and_then(|start| world.map.at(*start));
            if let Some(range) = known
                && let Kind::Imported { opened, .. } = &range.kind
            {
                *opened.lock() += 1;
                return out.set(range.start);
            }
        }
        // What the owner has freed is not there any more, or is another file.
        let gone = |_| CUresult::CUDA_ERROR_INVALID_VALUE;
        let path = format!("/proc/{}/fd/{}", handle.process, handle.descriptor);
        let file = File::options().read(true).write(true).open(path).map_err(gone)?;
        if file.metadata().map_err(gone)?.ino() != handle.inode {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let backing = Backing::of(file).map_err(|_| CUresult::CUDA_ERROR_MAP_FAILED)?;
        let block_length = backing.length();
        let block = backing::reserve(block_length, BLOCK).map_err(|_| CUresult::CUDA_ERROR_MAP_FAILED)?;
        let start = block + handle.offset;
        let kind = Kind::Imported {
            backing,
            offset: handle.offset,
            block,
            block_length,
            key,
            opened: Mutex::new(1),
        };
        driver.add_range(start, handle.length, device, context.handle, kind);
        driver.world.lock().imports.insert(key, start);
        driver.opened.note(key);
        out.set(start)
    }

    cuIpcCloseMemHandle(address: u64) |driver| {
        driver.current()?;
        let range = driver.world.lock().map.at(address).cloned();
        let Some(range) = range else {
            driver.note_freed_twice("imported memory", address);
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        let Kind::Imported { opened, .. } = &range.kind else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        let last = {
            let mut opened = opened.lock();
            *opened -= 1;
            *opened == 0
        };
        if last { driver.free_range(range) } else { Ok(()) }
    }
}

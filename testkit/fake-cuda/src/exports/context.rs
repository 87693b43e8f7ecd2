//! Contexts.

use std::sync::atomic::Ordering;

use cudarc::driver::sys::CUresult;

use super::{Handle, Out, device_number};
use crate::config::Defect;
use crate::context::{self, Context};

driver_calls! {
    cuDevicePrimaryCtxRetain(out: Out<Handle>, device: i32) |driver| {
        out.set(driver.retain_primary(device_number(device)?)?.handle)
    }

    cuDevicePrimaryCtxRelease_v2(device: i32) |driver| {
        driver.release_primary(device_number(device)?)
    }

    cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) |driver| {
        let device = device_number(device)?;
        driver.settings(device)?;
        let known = driver.world.lock().primaries.get(&device).map(|(context, _)| context.flags);
        flags.set(known.unwrap_or(0))?;
        active.set(i32::from(known.is_some()))
    }

    cuCtxCreate_v2(out: Out<Handle>, flags: u32, device: i32) |driver| {
        let device = device_number(device)?;
        driver.settings(device)?;
        let context = Context::new(driver.new_handle(), device, false, flags);
        driver.checker.contexts_created.fetch_add(1, Ordering::Relaxed);
        driver.world.lock().contexts.insert(context.handle, context.clone());
        context::push(context.handle);
        out.set(context.handle)
    }

    cuCtxDestroy_v2(handle: Handle) |driver| {
        let context = driver.context(handle)?;
        if context.primary {
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        driver.destroy_context(&context);
        if context::current_handle() == handle {
            context::pop();
        }
        Ok(())
    }

    cuCtxPushCurrent_v2(handle: Handle) |driver| {
        let context = driver.context(handle)?;
        let wrong = driver.has(Defect::WrongContext).then(|| driver.other_context(context.device));
        context::push(wrong.flatten().unwrap_or(handle));
        Ok(())
    }

    cuCtxPopCurrent_v2(out: Out<Handle>) |_driver| {
        let popped = context::pop().ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        out.offer(popped);
        Ok(())
    }

    cuCtxSetCurrent(handle: Handle) |driver| {
        if handle != 0 {
            driver.context(handle)?;
        }
        context::replace(handle);
        Ok(())
    }

    cuCtxGetCurrent(out: Out<Handle>) |_driver| {
        out.set(context::current_handle())
    }

    cuCtxGetDevice(out: Out<i32>) |driver| {
        out.set(driver.device_of_current()? as i32)
    }

    cuCtxGetFlags(out: Out<u32>) |driver| {
        out.set(driver.current()?.flags)
    }

    cuCtxGetApiVersion(handle: Handle, out: Out<u32>) |driver| {
        driver.context(handle)?;
        out.set(3020)
    }

    cuCtxGetId(handle: Handle, out: Out<u64>) |driver| {
        let handle = if handle == 0 { context::current_handle() } else { handle };
        out.set(driver.context(handle)?.handle as u64)
    }

    cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) |driver| {
        driver.current()?;
        least.offer(0);
        greatest.offer(-5);
        Ok(())
    }

    cuCtxSynchronize() |driver| {
        let context = driver.current()?;
        driver.may_be_unsafe()?;
        driver.finish_context(&context)
    }

    cuCtxEnablePeerAccess(peer: Handle, flags: u32) |driver| {
        let (context, peer) = (driver.current()?, driver.context(peer)?);
        if flags != 0 || peer.device == context.device {
            return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        if !driver.settings(context.device)?.peer || !driver.settings(peer.device)?.peer {
            return Err(CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
        }
        if context.enable_peer(peer.device) {
            Ok(())
        } else {
            Err(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
        }
    }

    cuCtxDisablePeerAccess(peer: Handle) |driver| {
        let (context, peer) = (driver.current()?, driver.context(peer)?);
        if context.disable_peer(peer.device) {
            Ok(())
        } else {
            Err(CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED)
        }
    }
}

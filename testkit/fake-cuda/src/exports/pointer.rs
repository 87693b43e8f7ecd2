//! Pointer attributes.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use cudarc::driver::sys::CUresult;

use super::{In, Out};
use crate::driver::Answer;
use crate::memory::attributes::{self, Value, number};
use crate::memory::map::Place;

driver_calls! {
    cuPointerGetAttribute(data: Out<c_void>, attribute: u32, address: u64) |driver| {
        let place = driver.world.lock().map.place(address);
        let Place::Known(range) = place else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        answer(data, attributes::of(driver, &range, address, attribute)?)
    }

    cuPointerGetAttributes(count: u32, which: In<u32>, data: In<Out<c_void>>, address: u64) |driver| {
        let place = driver.world.lock().map.place(address);
        for index in 0..count as usize {
            let attribute = which.nth(index).get()?;
            let value = match &place {
                Place::Known(range) => match attributes::of(driver, range, address, attribute) {
                    Ok(value) => value,
                    // One that does not fit the memory is not an error here.
                    Err(_) => attributes::of_unknown(attribute),
                },
                _ => attributes::of_unknown(attribute),
            };
            answer(data.nth(index).get()?, value)?;
        }
        Ok(())
    }

    cuPointerSetAttribute(value: In<c_void>, attribute: u32, address: u64) |driver| {
        let place = driver.world.lock().map.place(address);
        let Place::Known(range) = place else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        if attribute != number::SYNC_MEMOPS {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if !driver.settings(range.device)?.sync_memops || range.backing().is_none() {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let on: u32 = In(value.0.cast::<u32>()).get()?;
        range.sync_memops.store(on != 0, Ordering::Relaxed);
        Ok(())
    }
}

fn answer(data: Out<c_void>, value: Value) -> Answer {
    match value {
        Value::Byte(value) => Out(data.0.cast::<u8>()).set(value),
        Value::Word(value) => Out(data.0.cast::<u32>()).set(value),
        Value::Long(value) => Out(data.0.cast::<u64>()).set(value),
    }
}

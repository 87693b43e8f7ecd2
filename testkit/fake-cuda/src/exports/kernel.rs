//! Modules and kernels.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use cudarc::driver::sys::CUresult;

use super::{Handle, In, Out};
use crate::config::Defect;
use crate::driver::{Answer, Driver, is_engine};
use crate::kernels::{Arguments, Function, Machine, find};
use crate::stream::Op;
use crate::world::Module;

driver_calls! {
    cuModuleLoadData(out: Out<Handle>, image: In<c_char>) |driver| {
        load(driver, out, image)
    }

    cuModuleLoadDataEx(out: Out<Handle>, image: In<c_char>, option_count: u32, options: *const c_void, values: *const c_void) |driver| {
        if option_count > 0 && (options.is_null() || values.is_null()) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        load(driver, out, image)
    }

    cuModuleUnload(module: Handle) |driver| {
        driver.current()?;
        driver.may_be_unsafe()?;
        let mut world = driver.world.lock();
        if world.modules.remove(&module).is_none() {
            drop(world);
            return driver.bad_handle("module", module);
        }
        world.functions.retain(|_, function| function.module != module);
        Ok(())
    }

    cuModuleGetFunction(out: Out<Handle>, module: Handle, name: In<c_char>) |driver| {
        driver.current()?;
        let name = name.text()?;
        let mut world = driver.world.lock();
        let Some(entries) = world.modules.get(&module).map(|module| &module.entries) else {
            drop(world);
            return driver.bad_handle("module", module);
        };
        let kernel = find(&name).filter(|_| entries.contains(&name));
        let kernel = kernel.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        // The same function for the same name.
        let known = |(_, function): &(&usize, &Arc<Function>)| {
            function.module == module && std::ptr::eq(function.kernel, kernel)
        };
        if let Some((handle, _)) = world.functions.iter().find(known) {
            return out.set(*handle);
        }
        let handle = driver.new_handle();
        let function = Function {
            kernel,
            module,
            running: 0.into(),
        };
        world.functions.insert(handle, Arc::new(function));
        out.set(handle)
    }

    cuLaunchKernel(function: Handle, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32, shared: u32, stream: Handle, parameters: In<In<u64>>, extra: *const c_void) |driver| {
        let _ = shared;
        let block = u64::from(block_x) * u64::from(block_y) * u64::from(block_z);
        let grid = [grid_x, grid_y, grid_z];
        if grid.contains(&0) || grid_y > 65_535 || grid_z > 65_535 || block == 0 || block > 1024 || !extra.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let found = driver.world.lock().functions.get(&function).cloned();
        let Some(found) = found else {
            return driver.bad_handle("function", function);
        };
        let stream = driver.stream_for_work(stream)?;
        let owner = driver.world.lock().modules.get(&found.module).map(|module| module.context);
        if owner != Some(stream.context.handle) {
            driver.wrong_context("a kernel is launched in a stream of another context than its module's");
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        let mut arguments = Vec::new();
        for (index, size) in found.kernel.parameters.iter().enumerate() {
            let pointer: In<u64> = parameters.nth(index).get()?;
            let mut bytes = [0u8; 8];
            let from = In(pointer.0.cast::<u8>());
            for (at, byte) in bytes.iter_mut().take(*size).enumerate() {
                *byte = from.nth(at).get()?;
            }
            arguments.push(bytes);
        }
        let arguments = Arguments(arguments);
        if driver.has(Defect::NoCompletion) {
            let machine = Machine { driver, context: &stream.context, engine: stream.engine };
            machine.write_word(arguments.u64(3), arguments.u32(4))?;
        }
        driver.submit(&stream, Op::Launch { function: found, arguments })
    }
}

fn load(driver: &'static Driver, out: Out<Handle>, image: In<c_char>) -> Answer {
    driver.may_be_unsafe()?;
    let context = driver.current()?;
    let text = image.text()?;
    let mut entries = Vec::new();
    let mut words = text.split_ascii_whitespace();
    while let Some(word) = words.next() {
        match word {
            ".entry" => {
                let name = words.next().unwrap_or_default();
                entries.push(name.split('(').next().unwrap_or_default().to_owned());
            }
            ".target" => {
                let name = words.next().unwrap_or_default().trim_end_matches(',');
                let wanted: Option<i32> = name.strip_prefix("sm_").and_then(|number| number.parse().ok());
                let (major, minor) = driver.settings(context.device)?.compute;
                if wanted.is_none_or(|wanted| wanted > major * 10 + minor) {
                    return Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
                }
            }
            _ => {}
        }
    }
    if !text.contains(".version") {
        return Err(CUresult::CUDA_ERROR_INVALID_IMAGE);
    }
    let handle = driver.new_handle();
    let module = Module {
        context: context.handle,
        engine: is_engine(),
        entries,
    };
    driver.world.lock().modules.insert(handle, module);
    out.set(handle)
}

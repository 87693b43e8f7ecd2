//! A `libcuda.so.1` of our own, for tests: its devices are threads, their memory is out of the CPU's reach, their streams
//! run by themselves, and all of it misbehaves as the tests want it to.
//!
//! Production code loads it as it loads the real one, by its path. Tests make a [`FakeCuda`], hand
//! [`FakeCuda::library_path`] to the code under test, and change the devices' behaviour while it runs:
//!
//! ```no_run
//! use kvxfer_fake_cuda::FakeCuda;
//!
//! let fake = FakeCuda::with(&[("*", "op_jitter_us", "300"), ("gpu1", "dmabuf", "off")])?;
//! let library = fake.library_path(); // for the endpoint's configuration, here and in child processes
//! let engine = fake.engine(0)?; // who owns the memory and computes: its calls do not count as the code's under test
//! let blocks = engine.allocate(1 << 20)?;
//! let stream = engine.stream()?;
//! engine.fill(stream, blocks, 7, 1 << 20)?;
//! fake.set("*", "stall", "engine")?; // all processes, at once
//! assert_eq!(fake.read(blocks, 1)?, [0]);
//! assert_eq!(fake.count("synchronising"), 0);
//! fake.assert_clean();
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! A driver is found by where the library lies: the file [`FakeCuda`] copied beside a `cuda.conf`. A library that lies
//! elsewhere takes the directory in `KVXFER_FAKE_CUDA`; without that there are no devices. Each copy is an instance of
//! its own, so tests of one process do not share anything.
//!
//! # Keys
//!
//! `cuda.conf` has lines `device.key = value`, the device being `gpu0`, `gpu1`, … or `*`. A line for the device wins over
//! one for all; what [`FakeCuda::set_now`] sets wins over the file. Whatever follows `#` in a value is ignored, except
//! that it makes the value a new one. Changes are in effect from the next call, and the next piece of work, on.
//!
//! | key | values | default | what |
//! | --- | --- | --- | --- |
//! | `devices` | 0 … 16 | 2 | of `*` |
//! | `driver_version` | number | 12080 | of `*`; cuGetProcAddress gives no younger functions, and flags and attributes that are younger are refused |
//! | `name`, `pci`, `memory_bytes`, `compute` | text, `0000:17:00.0`, number, `9.0` | `Fake GPU N`, from bus 17 on, 80 GiB, 9.0 | |
//! | `attributes` | `number:value` with commas | none | what cuDeviceGetAttribute says of these |
//! | `gpudirect`, `dmabuf`, `vmm`, `peer`, `ipc`, `sync_memops` | `on`, `off` | `on` | whether the device has it |
//! | `flush_options` | `none`, `host`, `memops`, `both` | `host` | how network devices' writes can be flushed |
//! | `writes_ordering` | `none`, `owner`, `all` | `all` | `none`: what a network device writes through a dmabuf is seen by the device only after a flush |
//! | `alloc_offset` | bytes | 0 | where in its 2 MiB block an allocation of cuMemAlloc begins: 512 as small ones do |
//! | `reuse_addresses` | `on`, `off` | `on` | freed addresses are given out again |
//! | `op_delay_us`, `engine_delay_us`, `op_jitter_us` | number | 0 | before each piece of work, on streams of the code under test, of the engine; on all, before one in eight, at random, at most |
//! | `stall` | `off`, `on`, `engine`, `own`, `copies` | `off` | no work is begun: at all; on the engine's streams; on those of the code under test; no copies and kernels |
//! | `shuffle` | `on`, `off` | `on` | the pieces of a batch, or of a kernel, are copied in some order |
//! | `tear_us` | number | 0 | copies write their second half first, and the rest that much later |
//! | `poison` | `on`, `off` | `on` | page-locked memory that is to be written by a copy is overwritten when the copy is asked for |
//! | `op_error` | `code[:count[:skip]]`, `off` | `off` | work (of the code under test) fails on the device, `count` times after `skip` that do not, and breaks its context |
//! | `fail` | `call:code[:count[:skip]]` with commas | none | of `*`: calls that fail, `count` times, after `skip` calls that do not; `*` is any call. Not the engine's |
//! | `defect` | `off`, `no_event_wait`, `no_flush`, `host_taken_for_device`, `wrong_context`, `no_completion`, `no_buffer_id` | `off` | of `*`, or in `KVXFER_FAKE_CUDA_DEFECT`: calls of the code under test are as if it had made this mistake, which its tests must catch |
//! | `vanish` | `off`, `on`, code | `off` | of `*`: every call fails, and no work is done any more |
//!
//! A code is a number, or a name like `OUT_OF_MEMORY`. Calls are named as in the symbol table, like `cuMemAlloc_v2`.
//!
//! # Counts
//!
//! [`FakeCuda::count`] takes a call's name, or: `*` (all calls), `synchronising` (calls that wait for the device),
//! `copies` (done, each piece counts), `copies_in_flight`, `bytes` (copied), `unpinned_copies`, `contexts_created`,
//! `active_gpu0` (1 if a context of the device is there), `pinned_bytes`, `pinned_peak`, `violations`.
//!
//! # Violations
//!
//! [`FakeCuda::violations`] lists what is wrong even if it goes well: use of freed memory or destroyed objects, memory freed
//! or unpinned while a copy of it is queued, memory freed that another process has open, staging that copies of two streams use at once, no context or that of another
//! device, the default stream, a word written without a barrier, two launches of one function at once, driver calls in a
//! host function, calls that break the capture of another stream. They are also said on the standard error.
//!
//! # Kernels
//!
//! A module is PTX text; what it does is not read, only the names of its entries, which are looked for in a table of
//! functions in this crate (`kernels.rs`).
//!
//! # How it differs from hardware
//!
//! * Devices are threads of the process. If the process is stopped or killed, so is all its work.
//! * Work is done in its order within a stream, and otherwise whenever the threads run; a copy is visible to the CPU when
//!   its bytes are, which may be before an event says so.
//! * Physical memory is a file in memory, so a dmabuf can be mapped by anyone. A dmabuf that begins in the middle of it is
//!   a descriptor whose position is where it begins: whoever maps it adds that.
//! * With `writes_ordering` `none`, network devices map a second file, and see in it what the device writes by this
//!   process's calls; what they write is copied over by the flush, as a whole.
//! * Captured work is dropped; graphs cannot be launched. Arrays, 2D copies, surfaces, cooperative launches are missing.
//! * A copy's result that is used after the copy, but before its completion was asked for, is not noticed.

mod checker;
mod config;
mod context;
mod driver;
mod engine;
mod event;
mod exports;
mod fake;
mod kernels;
mod memory;
mod names;
mod shared;
mod stream;
mod work;
mod world;

pub use engine::Engine;
pub use fake::FakeCuda;

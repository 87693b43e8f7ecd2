//! All objects of the process, and what happens to several of them at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::ThreadId;

use cudarc::driver::sys::CUresult;

use crate::context::{Context, current_handle};
use crate::driver::{Answer, Driver, is_engine};
use crate::event::Event;
use crate::kernels::Function;
use crate::memory::backing;
use crate::memory::map::{Kind, Map, Physical, Range};
use crate::stream::{Op, Stream};
use crate::work::Flight;

/// A loaded module.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) context: usize,
    pub(crate) engine: bool,
    /// The names that its image offers.
    pub(crate) entries: Vec<String>,
}

/// All objects, by handle.
#[derive(Debug, Default)]
pub(crate) struct World {
    pub(crate) contexts: HashMap<usize, Arc<Context>>,
    /// By device, with how often each is retained.
    pub(crate) primaries: HashMap<u32, (Arc<Context>, i64)>,
    own_retains: HashMap<u32, i64>,
    pub(crate) streams: HashMap<usize, Arc<Stream>>,
    defaults: HashMap<(usize, Option<ThreadId>), Arc<Stream>>,
    pub(crate) events: HashMap<usize, Arc<Event>>,
    pub(crate) modules: HashMap<usize, Module>,
    pub(crate) functions: HashMap<usize, Arc<Function>>,
    pub(crate) graphs: HashMap<usize, bool>,
    /// Physical allocations by handle, with how often each is held.
    pub(crate) physicals: HashMap<u64, (Arc<Physical>, u32)>,
    /// Memory pools that were made: their devices.
    pub(crate) pools: HashMap<usize, u32>,
    /// Other processes' memory by what names it: where it is here.
    pub(crate) imports: HashMap<(u32, u64), u64>,
    pub(crate) map: Map,
    pub(crate) in_flight: Vec<Flight>,
}

impl World {
    /// Remembers how often the code under test holds a primary context.
    pub(crate) fn retains(&mut self, device: u32, change: i64) {
        if !is_engine() {
            *self.own_retains.entry(device).or_default() += change;
        }
    }

    /// Takes everything of a context out: its streams, and the memory to be freed.
    pub(crate) fn take_out(&mut self, context: usize) -> (Vec<Arc<Stream>>, Vec<Arc<Range>>) {
        let mut streams: Vec<Arc<Stream>> = Vec::new();
        for stream in self.streams.values().chain(self.defaults.values()) {
            if stream.context.handle == context {
                streams.push(stream.clone());
            }
        }
        self.streams.retain(|_, stream| stream.context.handle != context);
        self.defaults.retain(|(of, _), _| *of != context);
        self.events.retain(|_, event| event.context.handle != context);
        self.modules.retain(|_, module| module.context != context);
        let modules = &self.modules;
        self.functions
            .retain(|_, function| modules.contains_key(&function.module));
        let ranges = self.map.all().filter(|range| range.context == context);
        // What was registered stays the caller's; it is merely no longer page-locked, as all of the context.
        (streams, ranges.cloned().collect())
    }

    /// All streams of a context.
    pub(crate) fn streams_of(&self, context: usize) -> Vec<Arc<Stream>> {
        let all = self.streams.values().chain(self.defaults.values());
        all.filter(|stream| stream.context.handle == context).cloned().collect()
    }

    /// What the code under test has not given back, a line for each.
    pub(crate) fn leaks(&self) -> String {
        let mut lines = Vec::new();
        let own = |engine: bool| !engine;
        for (device, count) in self.own_retains.iter().filter(|(_, count)| **count != 0) {
            lines.push(format!("primary context of device {device}: retained {count} times"));
        }
        for context in self
            .contexts
            .values()
            .filter(|context| !context.primary && own(context.engine))
        {
            lines.push(format!("context {:#x} on device {}", context.handle, context.device));
        }
        for stream in self.streams.values().filter(|stream| own(stream.engine)) {
            lines.push(format!("stream {:#x}", stream.handle));
        }
        for (handle, _) in self.events.iter().filter(|(_, event)| own(event.engine)) {
            lines.push(format!("event {handle:#x}"));
        }
        for (handle, _) in self.modules.iter().filter(|(_, module)| own(module.engine)) {
            lines.push(format!("module {handle:#x}"));
        }
        for (handle, (physical, count)) in &self.physicals {
            if own(physical.engine) {
                lines.push(format!("physical allocation {handle:#x}: held {count} times"));
            }
        }
        for (start, (length, _)) in self.map.reserved.iter().filter(|(_, (_, engine))| own(*engine)) {
            lines.push(format!("{length} reserved addresses at {start:#x}"));
        }
        for range in self.map.all().filter(|range| own(range.engine)) {
            let kind = match range.kind {
                Kind::Device { .. } => "device memory",
                Kind::Pool { .. } => "device memory of a pool",
                Kind::Mapping { .. } => "mapping",
                Kind::Imported { .. } => "imported memory",
                Kind::HostAllocated { .. } => "page-locked memory",
                Kind::HostRegistered { .. } => "page-locked registration",
                Kind::Managed => "managed memory",
            };
            lines.push(format!("{kind}: {} bytes at {:#x}", range.length, range.start));
        }
        lines.sort();
        lines.iter().fold(String::new(), |text, line| text + line + "\n")
    }
}

impl Driver {
    /// The stream of that handle; the default ones are those of the current context.
    pub(crate) fn stream(&self, handle: usize) -> Answer<Arc<Stream>> {
        const LEGACY: usize = 1;
        const PER_THREAD: usize = 2;
        if handle > PER_THREAD {
            let stream = self.world.lock().streams.get(&handle).cloned();
            return match stream {
                Some(stream) => stream.context.sound().map(|()| stream),
                None => self.bad_handle("stream", handle),
            };
        }
        if !is_engine() {
            self.checker
                .violation("the default stream is used, which waits for the engine's streams");
        }
        let context = self.current()?;
        let legacy = handle <= LEGACY;
        let thread = (!legacy).then(|| std::thread::current().id());
        let mut world = self.world.lock();
        let new = || Stream::new(self.new_handle(), context.clone(), 0, 0, legacy);
        Ok(world
            .defaults
            .entry((context.handle, thread))
            .or_insert_with(new)
            .clone())
    }

    /// The stream of that handle, for work: the current context has to be its own.
    pub(crate) fn stream_for_work(&self, handle: usize) -> Answer<Arc<Stream>> {
        let context = self.current()?;
        let stream = self.stream(handle)?;
        if stream.context.handle != context.handle {
            self.wrong_context(&format!(
                "work for a stream of device {} is queued while a context of device {} is current",
                stream.context.device, context.device
            ));
        }
        Ok(stream)
    }

    /// Queues work in the stream's order, and that of the default stream; drops it in a capture.
    pub(crate) fn submit(&self, stream: &Arc<Stream>, op: Op) -> Answer {
        if self.is_capturing(stream)? {
            return Ok(());
        }
        let context = stream.context.handle;
        if stream.legacy {
            let others = self.world.lock().streams_of(context);
            for other in others.iter().filter(|other| other.is_blocking()) {
                let (queued, done) = other.progress();
                if done < queued {
                    stream.push(Op::WaitFor(other.clone(), queued));
                }
            }
        } else if stream.is_blocking() {
            let default = self.world.lock().defaults.get(&(context, None)).cloned();
            if let Some(default) = default {
                let (queued, done) = default.progress();
                if done < queued {
                    stream.push(Op::WaitFor(default, queued));
                }
            }
        }
        stream.push(op);
        Ok(())
    }

    /// The event of that handle.
    pub(crate) fn event(&self, handle: usize) -> Answer<Arc<Event>> {
        let event = self.world.lock().events.get(&handle).cloned();
        match event {
            Some(event) => Ok(event),
            None => self.bad_handle("event", handle),
        }
    }

    /// Frees device memory that begins there.
    pub(crate) fn free_device(&self, address: u64) -> Answer {
        let range = self.world.lock().map.at(address).cloned();
        match range {
            Some(range) if matches!(range.kind, Kind::Device { .. } | Kind::Pool { .. } | Kind::Managed) => {
                self.free_range(range)
            }
            _ => {
                self.note_freed_twice("memory", address);
                Err(CUresult::CUDA_ERROR_INVALID_VALUE)
            }
        }
    }

    /// Notes it if what is to be freed was freed before.
    pub(crate) fn note_freed_twice(&self, what: &str, address: u64) {
        if matches!(self.world.lock().map.place(address), crate::memory::map::Place::Freed) {
            self.checker
                .violation(&format!("{what} at {address:#x} is freed twice"));
        }
    }

    /// Removes a range and gives back what it has. Copies that touch it are noted.
    pub(crate) fn free_range(&self, range: Arc<Range>) -> Answer {
        let mut world = self.world.lock();
        let busy = world
            .in_flight
            .iter()
            .any(|flight| flight.touches(range.start, range.end()));
        if world.map.remove(range.start).is_none() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        match &range.kind {
            Kind::Device {
                block, block_length, ..
            }
            | Kind::Pool {
                block, block_length, ..
            } => {
                *world.map.used.entry(range.device).or_default() -= block_length;
                if self
                    .settings(range.device)
                    .is_ok_and(|settings| settings.reuse_addresses)
                {
                    world.map.keep_spare(*block, *block_length);
                }
            }
            Kind::Imported {
                key,
                block,
                block_length,
                ..
            } => {
                world.imports.remove(key);
                world.map.keep_spare(*block, *block_length);
            }
            // While a copy of it runs, unmapping would end the process: the memory is rather lost.
            Kind::HostAllocated { .. } | Kind::Managed if !busy => {
                backing::release(range.start, range.length.next_multiple_of(backing::PAGE));
            }
            _ => {}
        }
        drop(world);
        match &range.kind {
            Kind::Imported { key, .. } => self.opened.forget(*key),
            Kind::Device { backing, .. } => self.note_freed_open(&range, backing),
            _ => {}
        }
        if range.is_pinned() && !range.engine {
            self.checker.pinned(range.length, false);
        }
        if busy {
            let what = format!(
                "memory at {:#x} is freed or unpinned while a copy of it is queued",
                range.start
            );
            self.checker.violation(&what);
        }
        Ok(())
    }

    /// Notes it if another process has memory open that is freed: what it reads there from now on is anything.
    fn note_freed_open(&self, range: &Range, backing: &backing::Backing) {
        let Ok((_, inode)) = backing.identity() else { return };
        let who = self.opened.who((std::process::id(), inode));
        if !who.is_empty() {
            let what = format!(
                "memory at {:#x} is freed while other processes have it open: {who:?}",
                range.start
            );
            self.checker.violation(&what);
        }
    }

    /// Adds a range of the current thread's making.
    pub(crate) fn add_range(&self, start: u64, length: u64, device: u32, context: usize, kind: Kind) {
        let mut world = self.world.lock();
        let id = world.map.new_id();
        let range = Range {
            start,
            length,
            id,
            device,
            context,
            engine: is_engine(),
            kind,
            sync_memops: false.into(),
        };
        let pinned = range.is_pinned() && !range.engine;
        world.map.add(range);
        drop(world);
        if pinned {
            self.checker.pinned(length, true);
        }
    }

    /// Device memory, `length` bytes of it: makes the bytes and the addresses, and says where it begins.
    pub(crate) fn new_device_memory(
        &self,
        device: u32,
        context: usize,
        length: u64,
        pool: Option<usize>,
    ) -> Answer<u64> {
        let settings = self.settings(device)?;
        if length == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let out_of_memory = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let whole = length.checked_add(settings.alloc_offset).ok_or(out_of_memory)?;
        let block_length = whole.checked_next_multiple_of(backing::BLOCK).ok_or(out_of_memory)?;
        let block = {
            let mut world = self.world.lock();
            let used = world.map.used.entry(device).or_default();
            if *used + block_length > settings.memory_bytes {
                return Err(out_of_memory);
            }
            *used += block_length;
            world.map.take_spare(block_length)
        };
        let give_back = |_| {
            *self.world.lock().map.used.entry(device).or_default() -= block_length;
            out_of_memory
        };
        let block = match block {
            Some(block) => block,
            None => backing::reserve(block_length, backing::BLOCK).map_err(give_back)?,
        };
        let backing = backing::Backing::new(block_length).map_err(give_back)?;
        let offset = settings.alloc_offset;
        let kind = match pool {
            None => Kind::Device {
                backing,
                offset,
                block,
                block_length,
            },
            Some(pool) => Kind::Pool {
                backing,
                offset,
                block,
                block_length,
                pool,
            },
        };
        self.add_range(block + offset, length, device, context, kind);
        Ok(block + offset)
    }

    /// Makes what network devices have written into a device's memory visible to it.
    pub(crate) fn publish(&self, device: u32) {
        let backings: Vec<_> = {
            let world = self.world.lock();
            let of_device = world.map.all().filter(|range| range.device == device);
            of_device.filter_map(|range| Some(range.backing()?.0.clone())).collect()
        };
        for backing in backings {
            backing.publish();
        }
    }

    /// Waits for all work of the current context.
    pub(crate) fn finish_context(&self, context: &Context) -> Answer {
        let streams = self.world.lock().streams_of(context.handle);
        for stream in streams {
            stream.finish();
        }
        context.sound()
    }

    /// The number of the thread's current context, or of the device's primary one, that new memory belongs to.
    pub(crate) fn device_of_current(&self) -> Answer<u32> {
        let handle = current_handle();
        let world = self.world.lock();
        world
            .contexts
            .get(&handle)
            .map(|context| context.device)
            .ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)
    }

    /// Counts the copies that the code under test has queued and that are not done.
    pub(crate) fn copies_in_flight(&self) -> u64 {
        self.world.lock().in_flight.len() as u64
    }

    /// Whether a context of the device exists in this process.
    pub(crate) fn is_active(&self, device: u32) -> bool {
        let world = self.world.lock();
        world.contexts.values().any(|context| context.device == device)
    }

    /// How often calls were made.
    pub(crate) fn count(&self, name: &str) -> u64 {
        match name {
            "copies_in_flight" => self.copies_in_flight(),
            "total" => self.checker.total.load(Ordering::Relaxed),
            other => match other.strip_prefix("active_gpu").and_then(|device| device.parse().ok()) {
                Some(device) => u64::from(self.is_active(device)),
                None => self.checker.count(other),
            },
        }
    }
}

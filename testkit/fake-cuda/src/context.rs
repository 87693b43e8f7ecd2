//! Contexts, and which one is current on each thread.

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use cudarc::driver::sys::CUresult;
use parking_lot::Mutex;

use crate::driver::{Answer, Driver, is_engine};
use crate::names;

/// How long destroying a context waits for its work.
const DESTROY_LIMIT: Duration = Duration::from_secs(2);

/// How many contexts can be current above each other on a thread.
const DEPTH: usize = 16;

thread_local! {
    /// Nothing that has to be dropped: a thread may still make calls while it ends.
    static CURRENT: Cell<Stack> = const { Cell::new(Stack { contexts: [0; DEPTH], depth: 0 }) };
}

#[derive(Clone, Copy)]
struct Stack {
    contexts: [usize; DEPTH],
    depth: usize,
}

/// A context of a device.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) handle: usize,
    pub(crate) device: u32,
    pub(crate) primary: bool,
    /// Made by the test's engine.
    pub(crate) engine: bool,
    pub(crate) flags: u32,
    /// The error that every call answers once work has failed; 0 for none.
    error: AtomicU32,
    destroyed: AtomicBool,
    peers: Mutex<HashSet<u32>>,
}

impl Context {
    /// A new one.
    pub(crate) fn new(handle: usize, device: u32, primary: bool, flags: u32) -> Arc<Context> {
        Arc::new(Context {
            handle,
            device,
            primary,
            engine: is_engine(),
            flags,
            error: AtomicU32::new(0),
            destroyed: AtomicBool::new(false),
            peers: Mutex::new(HashSet::new()),
        })
    }

    /// Work has failed: the context is of no use any more.
    pub(crate) fn fail(&self, code: CUresult) {
        let _ = self
            .error
            .compare_exchange(0, code as u32, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Whether it can still be used.
    pub(crate) fn sound(&self) -> Answer {
        if self.destroyed.load(Ordering::Acquire) {
            return Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
        }
        match self.error.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(names::from_number(code).unwrap_or(CUresult::CUDA_ERROR_UNKNOWN)),
        }
    }

    /// It is destroyed.
    pub(crate) fn destroy(&self) {
        self.destroyed.store(true, Ordering::Release);
    }

    /// Whether its kernels reach the memory of another device.
    pub(crate) fn reaches(&self, device: u32) -> bool {
        self.peers.lock().contains(&device)
    }

    /// Allows its kernels to reach another device; false if they were allowed to.
    pub(crate) fn enable_peer(&self, device: u32) -> bool {
        self.peers.lock().insert(device)
    }

    /// The reverse; false if they were not allowed to.
    pub(crate) fn disable_peer(&self, device: u32) -> bool {
        self.peers.lock().remove(&device)
    }
}

/// The handle of this thread's current context; 0 for none.
pub(crate) fn current_handle() -> usize {
    let stack = CURRENT.get();
    stack.depth.checked_sub(1).map_or(0, |top| stack.contexts[top])
}

/// Makes a context current above the others.
pub(crate) fn push(handle: usize) {
    let mut stack = CURRENT.get();
    assert!(stack.depth < DEPTH, "fake-cuda: too many contexts are pushed");
    stack.contexts[stack.depth] = handle;
    stack.depth += 1;
    CURRENT.set(stack);
}

/// Takes the current one off.
pub(crate) fn pop() -> Option<usize> {
    let mut stack = CURRENT.get();
    stack.depth = stack.depth.checked_sub(1)?;
    CURRENT.set(stack);
    Some(stack.contexts[stack.depth])
}

/// Puts a context in the current one's place; 0 takes it off.
pub(crate) fn replace(handle: usize) {
    pop();
    if handle != 0 {
        push(handle);
    }
}

impl Driver {
    /// This thread's current context, which work needs.
    pub(crate) fn current(&self) -> Answer<Arc<Context>> {
        let handle = current_handle();
        let context = self.world.lock().contexts.get(&handle).cloned();
        match context {
            Some(context) => context.sound().map(|()| context),
            None if handle == 0 => {
                self.wrong_context("a call needs a context, and none is current");
                Err(CUresult::CUDA_ERROR_INVALID_CONTEXT)
            }
            None => {
                self.wrong_context("the current context was destroyed");
                Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)
            }
        }
    }

    /// Notes it, unless it is the engine that does so.
    pub(crate) fn wrong_context(&self, what: &str) {
        if !is_engine() {
            self.checker.violation(&format!("wrong context: {what}"));
        }
    }

    /// The context of that handle.
    pub(crate) fn context(&self, handle: usize) -> Answer<Arc<Context>> {
        let context = self.world.lock().contexts.get(&handle).cloned();
        match context {
            Some(context) => Ok(context),
            None if self.was_handle(handle) => {
                self.bad_handle::<()>("context", handle).ok();
                Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)
            }
            None => Err(CUresult::CUDA_ERROR_INVALID_CONTEXT),
        }
    }

    /// The primary context of a device, made if it is not there; counts its users.
    pub(crate) fn retain_primary(&self, device: u32) -> Answer<Arc<Context>> {
        self.settings(device)?;
        let mut world = self.world.lock();
        if let Some((context, users)) = world.primaries.get_mut(&device) {
            *users += 1;
            let context = context.clone();
            world.retains(device, 1);
            return Ok(context);
        }
        let context = Context::new(self.new_handle(), device, true, 0);
        self.checker.contexts_created.fetch_add(1, Ordering::Relaxed);
        world.contexts.insert(context.handle, context.clone());
        world.primaries.insert(device, (context.clone(), 1));
        world.retains(device, 1);
        Ok(context)
    }

    /// The handle of a primary context of another device, if there is one.
    pub(crate) fn other_context(&self, device: u32) -> Option<usize> {
        let world = self.world.lock();
        let mut others = world.primaries.iter().filter(|(other, _)| **other != device);
        others.next().map(|(_, (context, _))| context.handle)
    }

    /// One user less; the last destroys it.
    pub(crate) fn release_primary(&self, device: u32) -> Answer {
        self.settings(device)?;
        let mut world = self.world.lock();
        let Some((context, users)) = world.primaries.get_mut(&device) else {
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        };
        *users -= 1;
        let (context, last) = (context.clone(), *users == 0);
        world.retains(device, -1);
        if last {
            world.primaries.remove(&device);
            drop(world);
            self.destroy_context(&context);
        }
        Ok(())
    }

    /// Destroys a context with everything that is in it.
    pub(crate) fn destroy_context(&self, context: &Context) {
        let (streams, ranges) = {
            let mut world = self.world.lock();
            world.contexts.remove(&context.handle);
            world.take_out(context.handle)
        };
        for stream in streams {
            // Not for ever: a test that fails while it has stalled the work shall end.
            stream.finish_within(DESTROY_LIMIT);
            stream.close();
        }
        context.destroy();
        for range in ranges {
            // It is there: it was listed just now, and only this call destroys the context.
            let _ = self.free_range(range);
        }
    }
}

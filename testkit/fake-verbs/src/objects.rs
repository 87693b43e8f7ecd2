//! The objects that callers hold as pointers. Each starts with the structure of the C interface.
//!
//! They are never freed, only marked as destroyed, so that a use after destroy is counted as misuse instead of
//! reading freed memory. What is large inside them is let go.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvxfer_rdma::sys::{ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_mr, ibv_pd, ibv_qp};

use crate::completion::CompletionQueue;
use crate::context::Context;
use crate::counters::add;
use crate::device::Device;
use crate::event::Channel;

/// Whether an object lives: [`LIVE`], or [`DESTROYED`]. Anything else is no object of ours.
#[derive(Debug)]
pub(crate) struct Mark(AtomicU32);

const LIVE: u32 = 0x6661_6b65;
const DESTROYED: u32 = 0xdead_dead;

impl Mark {
    fn new() -> Mark {
        Mark(AtomicU32::new(LIVE))
    }

    /// Whether the object has not been destroyed.
    pub(crate) fn is_live(&self) -> bool {
        self.0.load(Ordering::Acquire) == LIVE
    }

    /// Marks the object as destroyed.
    pub(crate) fn destroy(&self) {
        self.0.store(DESTROYED, Ordering::Release);
    }
}

macro_rules! object {
    ($(#[$doc:meta])* $name:ident, $raw:ty, $($(#[$field_doc:meta])* $field:ident: $type:ty,)*) => {
        $(#[$doc])*
        #[repr(C)]
        pub(crate) struct $name {
            /// What callers see. First, so that their pointer is ours.
            pub(crate) raw: UnsafeCell<$raw>,
            /// Whether it lives.
            pub(crate) mark: Mark,
            $($(#[$field_doc])* pub(crate) $field: $type,)*
        }

        // SAFETY: `raw` is written only when the object is made and, by the state machine, under the context's lock;
        // callers read it under the rules of the C interface. Everything else in it is Sync by itself.
        unsafe impl Sync for $name {}
        // SAFETY: as for Sync; nothing in it belongs to a thread.
        unsafe impl Send for $name {}

        impl $name {
            /// Makes the object; it is never freed.
            pub(crate) fn leak(raw: $raw, $($field: $type,)*) -> &'static $name {
                Box::leak(Box::new($name { raw: UnsafeCell::new(raw), mark: Mark::new(), $($field,)* }))
            }

            /// The pointer that callers hold.
            pub(crate) fn pointer(&self) -> *mut $raw {
                self.raw.get()
            }

            /// The object behind a caller's pointer, whether it lives or not; none for a null pointer.
            ///
            /// # Safety
            /// The pointer is null or came from [`Self::pointer`].
            pub(crate) unsafe fn any(pointer: *const $raw) -> Option<&'static $name> {
                // SAFETY: it points to `raw`, the first field of a `repr(C)` object that is never freed.
                unsafe { pointer.cast::<$name>().as_ref() }
            }
        }
    };
}

object!(
    /// A context: an opened device.
    FakeContext, ibv_context,
    context: Arc<Context>,
);

object!(
    /// A protection domain.
    FakePd, ibv_pd,
    context: Arc<Context>,
    /// How many regions and queue pairs are in it.
    users: AtomicU32,
);

object!(
    /// A memory region.
    FakeMr, ibv_mr,
    context: Arc<Context>,
    pd: &'static FakePd,
);

object!(
    /// A completion channel.
    FakeChannel, ibv_comp_channel,
    context: Arc<Context>,
    channel: Channel,
    /// How many completion queues use it.
    users: AtomicU32,
);

object!(
    /// A completion queue.
    FakeCq, ibv_cq,
    context: Arc<Context>,
    channel: Option<&'static FakeChannel>,
    queue: CompletionQueue,
    /// How many times a queue pair uses it.
    users: AtomicU32,
);

object!(
    /// A queue pair.
    FakeQp, ibv_qp,
    context: Arc<Context>,
    pd: &'static FakePd,
    send_cq: &'static FakeCq,
    receive_cq: &'static FakeCq,
    /// Send requests posted and not yet given back by a polled completion.
    sends_used: AtomicU32,
    /// Receives posted and not yet given back by a polled completion.
    receives_used: AtomicU32,
);

/// A device in the list. Interned per name: contexts refer to it for ever.
#[repr(C)]
pub(crate) struct FakeDevice {
    raw: UnsafeCell<ibv_device>,
    /// What it is.
    pub(crate) device: Device,
}

// SAFETY: `raw` is never written after it was made.
unsafe impl Sync for FakeDevice {}

impl FakeDevice {
    /// Makes the device; it is never freed.
    pub(crate) fn leak(raw: ibv_device, device: Device) -> &'static FakeDevice {
        Box::leak(Box::new(FakeDevice {
            raw: UnsafeCell::new(raw),
            device,
        }))
    }

    /// The pointer that callers hold.
    pub(crate) fn pointer(&self) -> *mut ibv_device {
        self.raw.get()
    }

    /// The device behind a caller's pointer; none for a null pointer.
    ///
    /// # Safety
    /// The pointer is null or came from [`FakeDevice::pointer`].
    pub(crate) unsafe fn any(pointer: *const ibv_device) -> Option<&'static FakeDevice> {
        // SAFETY: it points to `raw`, the first field of a `repr(C)` object that is never freed.
        unsafe { pointer.cast::<FakeDevice>().as_ref() }
    }
}

macro_rules! live {
    ($name:ident, $raw:ty) => {
        impl $name {
            /// The live object behind a caller's pointer. A destroyed one is counted as misuse.
            ///
            /// # Safety
            /// The pointer is null or came from an object of this kind.
            pub(crate) unsafe fn live(pointer: *const $raw) -> Option<&'static $name> {
                // SAFETY: the caller's promise is the same.
                let object = unsafe { $name::any(pointer) }?;
                if object.mark.is_live() {
                    return Some(object);
                }
                object
                    .context
                    .misuse(concat!("use of a destroyed ", stringify!($name)));
                None
            }
        }
    };
}

live!(FakeContext, ibv_context);
live!(FakePd, ibv_pd);
live!(FakeMr, ibv_mr);
live!(FakeChannel, ibv_comp_channel);
live!(FakeCq, ibv_cq);
live!(FakeQp, ibv_qp);

impl Context {
    /// Counts a call that broke the rules, and says which on the standard error.
    pub(crate) fn misuse(&self, what: &str) {
        add(&self.device.counters.misuse, 1);
        eprintln!("fake-verbs: {}: misuse: {what}", self.device.name);
    }
}

//! Streams of the engine's that wait for something of ours: for a word in page-locked memory, which is written when the
//! hold is released.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUevent, CUstream};
use kvxfer_core::ErrorKind;
use parking_lot::Mutex;

use crate::context::{Current, Primary};
use crate::domain::pinned::{PinnedBlock, PinnedBytes};
use crate::driver::{Code, Driver, Refused};
use crate::error::CudaError;

/// Holds at once, with those that were released and whose streams have not come to them yet.
const HOLDS_MAX: usize = 2048;
/// Two words each: what the stream waits for, and what it writes when it has gone on.
const WORD_BYTES: usize = 4;
const BLOCK_BYTES: usize = 2 * HOLDS_MAX * WORD_BYTES;
/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: u32 = 2;
/// How long the end waits for streams that have been released to go on.
const END_WAIT: Duration = Duration::from_millis(200);

/// The words of all holds. A pair is used again when the stream that waited has gone on; each use has the next value.
pub(crate) struct Holds {
    block: PinnedBlock,
    pairs: Mutex<Pairs>,
    /// Behind waits of streams that could not be told to write when they go on.
    instead: Mutex<Vec<Instead>>,
}

/// What tells that a stream has gone on where no word does: an event, or nothing.
struct Instead(Option<CUevent>);

// SAFETY: a handle that the driver allows on any thread.
unsafe impl Send for Instead {}

struct Pairs {
    free: Vec<usize>,
    /// Their streams may not have come to their waits yet.
    released: Vec<usize>,
    values: Vec<u32>,
}

/// A stream that waits. Released, or dropped, it goes on.
#[must_use = "a stream goes on when its hold is dropped"]
pub struct StreamHold {
    holds: Arc<Holds>,
    index: usize,
    value: u32,
    retired: bool,
}

impl Holds {
    pub(crate) fn new(primary: &Arc<Primary>, pinned: &PinnedBytes) -> Result<Arc<Holds>, Refused> {
        Ok(Arc::new(Holds {
            block: PinnedBlock::allocate(primary, BLOCK_BYTES, pinned)?,
            pairs: Mutex::new(Pairs {
                free: (0..HOLDS_MAX).rev().collect(),
                released: Vec::new(),
                values: vec![0; HOLDS_MAX],
            }),
            instead: Mutex::default(),
        }))
    }

    /// Lets a stream wait.
    ///
    /// # Safety
    /// A live stream; its context is current.
    pub(crate) unsafe fn hold(self: &Arc<Holds>, driver: &Driver, stream: CUstream) -> Result<StreamHold, CudaError> {
        let (index, value) = {
            let mut pairs = self.pairs.lock();
            if pairs.free.is_empty() {
                self.reclaim(&mut pairs);
            }
            let Some(index) = pairs.free.pop() else {
                return Err(CudaError::Limit {
                    what: "stream holds",
                    limit: HOLDS_MAX,
                });
            };
            pairs.values[index] = pairs.values[index].wrapping_add(1);
            (index, pairs.values[index])
        };
        let mut hold = StreamHold {
            holds: Arc::clone(self),
            index,
            value,
            retired: false,
        };
        let (word, told) = (self.device_word(index), self.device_word(HOLDS_MAX + index));
        // SAFETY: the caller vouches for the stream; the words live until it has gone on (see `Drop`). Waits until the
        // word is at least the value.
        if let Err(refused) = unsafe { driver.stream_wait_value(stream, word, value, 0) } {
            // Nobody waits, and nobody will tell.
            self.block
                .word(self.offset(HOLDS_MAX + index))
                .store(value, Ordering::Release);
            return Err(CudaError::call(refused, "a stream of the caller's"));
        }
        // SAFETY: as above.
        if let Err(refused) = unsafe { driver.stream_write_value(stream, told, value, 0) } {
            tracing::debug!(%refused, "an event tells when a held stream has gone on");
            // The pair is not used again: see `StreamHold::drop`.
            hold.retired = true;
            self.block
                .word(self.offset(HOLDS_MAX + index))
                .store(value, Ordering::Release);
            // SAFETY: the caller vouches for the stream, whose context is current.
            let event = unsafe { event_behind(driver, stream) }.ok();
            self.instead.lock().push(Instead(event));
        }
        Ok(hold)
    }

    fn offset(&self, word: usize) -> usize {
        word * WORD_BYTES
    }

    fn device_word(&self, word: usize) -> u64 {
        self.block.device() + self.offset(word) as u64
    }

    fn release(&self, index: usize, value: u32, retired: bool) {
        self.block.word(self.offset(index)).store(value, Ordering::Release);
        if !retired {
            self.pairs.lock().released.push(index);
        }
    }

    fn reclaim(&self, pairs: &mut Pairs) {
        let Pairs { free, released, values } = pairs;
        released.retain(|index| {
            let gone_on = self.has_gone_on(*index, values[*index]);
            if gone_on {
                free.push(*index);
            }
            !gone_on
        });
    }

    /// Whether the stream that last waited for a pair's word has gone on.
    fn has_gone_on(&self, index: usize, value: u32) -> bool {
        self.block.word(self.offset(HOLDS_MAX + index)).load(Ordering::Acquire) == value
    }

    fn all_have_gone_on(&self) -> bool {
        let pairs = self.pairs.lock();
        let mut pairs = pairs.values.iter().enumerate();
        pairs.all(|(index, value)| self.has_gone_on(index, *value))
    }
}

impl Drop for Holds {
    /// All are released; but a stream may not have come to its wait yet, and would then read what is freed.
    fn drop(&mut self) {
        let primary = Arc::clone(self.block.primary());
        let instead = std::mem::take(self.instead.get_mut());
        let deadline = Instant::now() + END_WAIT;
        let current = primary.enter_to_give_back();
        // SAFETY: events of ours, live until they are destroyed below.
        let happened = |event| current.is_ok() && unsafe { primary.driver().event_query(event) }.is_ok();
        let over = loop {
            let all = instead.iter().all(|Instead(event)| event.is_some_and(happened));
            let over = all && self.all_have_gone_on();
            if over || Instant::now() >= deadline || instead.iter().any(|Instead(event)| event.is_none()) {
                break over;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        for Instead(event) in instead {
            if let Some(event) = event {
                // SAFETY: ours, destroyed once.
                let _ = unsafe { primary.driver().event_destroy(event) };
            }
        }
        if !over {
            tracing::warn!("a held stream has not gone on yet: its word in locked memory stays for it");
            self.block.keep();
        }
    }
}

/// An event of ours behind what is in a stream.
///
/// # Safety
/// A live stream, whose context is current.
unsafe fn event_behind(driver: &Driver, stream: CUstream) -> Result<CUevent, Refused> {
    let mut event = std::ptr::null_mut();
    // SAFETY: writes one handle.
    unsafe { driver.event_create(&mut event, NO_TIMING) }?;
    // SAFETY: both are live.
    let recorded = unsafe { driver.event_record(event, stream) };
    if recorded.is_err() {
        // SAFETY: made above, and nobody else's.
        let _ = unsafe { driver.event_destroy(event) };
    }
    recorded.map(|()| event)
}

impl StreamHold {
    /// Lets the stream go on.
    pub fn release(self) {}
}

impl Drop for StreamHold {
    fn drop(&mut self) {
        self.holds.release(self.index, self.value, self.retired);
    }
}

impl fmt::Debug for StreamHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamHold({})", self.index)
    }
}

/// A stream of the caller's, its context current.
pub(crate) struct Held<'a> {
    pub(crate) stream: CUstream,
    pub(crate) context: cudarc::driver::sys::CUcontext,
    pub(crate) device: cudarc::driver::sys::CUdevice,
    pub(crate) _current: Current<'a>,
}

/// Looks at a stream that is to wait: its context, its device, and that it is not being captured.
///
/// # Safety
/// A live `CUstream`.
pub(crate) unsafe fn look(driver: &Driver, stream: *mut c_void) -> Result<Held<'_>, CudaError> {
    let failed = |refused| CudaError::call(refused, "a stream of the caller's");
    let stream: CUstream = stream.cast();
    let mut context = std::ptr::null_mut();
    // SAFETY: the caller vouches for the stream; writes one handle.
    unsafe { driver.stream_context(stream, &mut context) }.map_err(failed)?;
    let current = Current::push(driver, context).map_err(failed)?;
    let mut capturing = 0;
    // SAFETY: as above; writes one integer.
    match unsafe { driver.stream_capturing(stream, &mut capturing) } {
        Ok(()) => {}
        Err(refused) if refused.code == Code::ABSENT => {}
        Err(refused) => return Err(failed(refused)),
    }
    if capturing != 0 {
        return Err(CudaError::Unfit {
            kind: ErrorKind::InvalidArgument,
            what: "a stream that is to wait".into(),
            why: "it is being captured into a graph, which would wait again at each launch".into(),
            remedy: "let a stream wait outside of a capture",
        });
    }
    let mut device = 0;
    // SAFETY: writes one integer.
    unsafe { driver.context_device(&mut device) }.map_err(failed)?;
    Ok(Held {
        stream,
        context,
        device,
        _current: current,
    })
}

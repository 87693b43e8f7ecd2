//! What offers, claims, grant handles and transfers have in common: how they end.

use std::ffi::{c_char, c_void};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvxfer::{
    Arrival, Claim, Completion, Delivery, GrantHandle, MemberVerdict, Offer, Release, Result, Transfer, Verdict,
    WaitingOn,
};

use crate::address::kvx_id128;
use crate::call::{Length, Status, call, keep};
use crate::input::{self, grows};
use crate::layout::beyond;
use crate::output::{Out, OutBytes, OutStruct, OutStructs, OutText};
use crate::status::{
    KVX_DESTINATION_UNTOUCHED, KVX_ERR_UNKNOWN, KVX_OK, KVX_PENDING, code, described, destination, kvx_destination,
    kvx_status,
};
use crate::table::{self, Kind};

/// A kvx_offer, kvx_claim, kvx_grant_handle or kvx_transfer: something that goes on and ends once.
pub type kvx_handle = u64;

/// How a handle stands, or how it ended.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_result {
    /// sizeof(kvx_result), set by the caller.
    pub struct_size: u32,
    /// KVX_PENDING while it is open; KVX_OK if it ended well; or the KVX_ERR_... code of what ended it.
    pub status: kvx_status,
    /// 1 if repeating the operation later can succeed without a change by the caller.
    pub retryable: u32,
    /// What is known of the destination blocks. While the handle is open: KVX_DESTINATION_QUARANTINED, do not reuse them.
    pub destination: kvx_destination,
    /// Bytes placed (or read, for a grant to read). 0 for offers.
    pub bytes: u64,
    /// Bytes of the message that came with the arrival; 0 if there is none.
    pub message_length: u64,
    /// Of an offer: claims that were served, each with a verdict.
    pub members: u64,
}
grows!(kvx_result, 40);

/// How one claim of an offer ended.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_member {
    /// Set by the library, to the element size that the caller gave.
    pub struct_size: u32,
    /// KVX_OK: the bytes are in place. Or the code of what ended it; KVX_ERR_UNKNOWN: its owner does not remember.
    pub status: kvx_status,
    /// The claimant.
    pub peer: kvx_id128,
    /// Its claim set.
    pub set: kvx_id128,
    /// Its number in the set.
    pub member: u32,
    /// What is known of its blocks.
    pub destination: kvx_destination,
}
grows!(kvx_member, 48);

/// A Rust handle behind a C one. Freeing it cancels what is open, unless it was detached.
pub struct Held<T: Ends> {
    inner: ManuallyDrop<T>,
    detached: AtomicBool,
}

impl<T: Ends> Held<T> {
    pub(crate) fn new(inner: T) -> Held<T> {
        Held {
            inner: ManuallyDrop::new(inner),
            detached: AtomicBool::new(false),
        }
    }
}

impl<T: Ends> Deref for Held<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: Ends> Drop for Held<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and not used after.
        let inner = unsafe { ManuallyDrop::take(&mut self.inner) };
        if *self.detached.get_mut() {
            inner.go_on();
        }
    }
}

/// How a handle ended well.
#[derive(Default)]
pub struct Ended {
    bytes: u64,
    message: Option<Arc<[u8]>>,
    members: Vec<MemberVerdict>,
}

impl From<Release> for Ended {
    fn from(release: Release) -> Ended {
        Ended {
            members: release.members,
            ..Ended::default()
        }
    }
}

impl From<Arrival> for Ended {
    fn from(arrival: Arrival) -> Ended {
        Ended {
            bytes: arrival.bytes,
            message: arrival.message,
            ..Ended::default()
        }
    }
}

impl From<Delivery> for Ended {
    fn from(delivery: Delivery) -> Ended {
        Ended {
            bytes: delivery.bytes,
            ..Ended::default()
        }
    }
}

/// What the four kinds have in common.
pub trait Ends {
    /// How it ends well.
    type End: Clone + Into<Ended>;
    /// Its end.
    fn end(&self) -> &Completion<Self::End>;
    /// Ends it.
    fn stop(&self);
    /// Lets it go on without a handle.
    fn go_on(self);
    /// What it waits for.
    fn waits_for(&self) -> Option<WaitingOn>;
    /// The number that its events carry.
    fn number(&self) -> u64;
}

macro_rules! ends {
    ($($type:ident by $completion:ident as $end:ident;)*) => {
        $(impl Ends for $type {
            type End = $end;
            fn end(&self) -> &Completion<$end> {
                self.$completion()
            }
            fn stop(&self) {
                self.cancel();
            }
            fn go_on(self) {
                self.detach();
            }
            fn waits_for(&self) -> Option<WaitingOn> {
                self.waiting_on()
            }
            fn number(&self) -> u64 {
                self.id().0
            }
        })*
    };
}

ends! {
    Offer by released as Release;
    Claim by arrived as Arrival;
    GrantHandle by arrived as Arrival;
    Transfer by done as Delivery;
}

/// A handle of any of the four kinds, behind one interface.
trait Going {
    fn poll(&self) -> Option<Result<Ended>>;
    fn wait(&self, timeout: Duration) -> Option<Result<Ended>>;
    fn cancel(&self);
    fn detach(&self);
    fn waiting_on(&self) -> Option<WaitingOn>;
    fn id(&self) -> u64;
}

impl<T: Ends> Going for Held<T> {
    fn poll(&self) -> Option<Result<Ended>> {
        Some(self.end().poll()?.map(Into::into))
    }
    fn wait(&self, timeout: Duration) -> Option<Result<Ended>> {
        Some(self.end().wait_timeout(timeout)?.map(Into::into))
    }
    fn cancel(&self) {
        self.stop();
    }
    fn detach(&self) {
        self.detached.store(true, Ordering::Relaxed);
    }
    fn waiting_on(&self) -> Option<WaitingOn> {
        self.waits_for()
    }
    fn id(&self) -> u64 {
        self.number()
    }
}

fn going(handle: kvx_handle) -> Result<Arc<dyn Going>> {
    each(
        handle,
        table::get::<Held<Offer>>,
        table::get::<Held<Claim>>,
        table::get,
        table::get,
    )
}

fn removed(handle: kvx_handle) -> Result<Arc<dyn Going>> {
    each(
        handle,
        table::remove::<Held<Offer>>,
        table::remove::<Held<Claim>>,
        table::remove,
        table::remove,
    )
}

fn each(
    handle: kvx_handle,
    offer: impl FnOnce(u64) -> Result<Arc<Held<Offer>>>,
    claim: impl FnOnce(u64) -> Result<Arc<Held<Claim>>>,
    grant: impl FnOnce(u64) -> Result<Arc<Held<GrantHandle>>>,
    transfer: impl FnOnce(u64) -> Result<Arc<Held<Transfer>>>,
) -> Result<Arc<dyn Going>> {
    match table::kind_of(handle) {
        <Held<Offer> as Kind>::NUMBER => Ok(offer(handle)?),
        <Held<Claim> as Kind>::NUMBER => Ok(claim(handle)?),
        <Held<GrantHandle> as Kind>::NUMBER => Ok(grant(handle)?),
        <Held<Transfer> as Kind>::NUMBER => Ok(transfer(handle)?),
        _ => Err(table::not_a_handle("offer, claim, grant or transfer", 0, handle)),
    }
}

/// Writes the result if it is wanted, and gives the status. An error becomes this thread's last one too.
fn told(ended: Option<Result<Ended>>, out: Option<OutStruct<kvx_result>>) -> Status {
    let mut result = input::defaults::<kvx_result>();
    match ended {
        None => {
            result.status = KVX_PENDING;
            result.destination = destination(kvxfer::Destination::Quarantined);
        }
        Some(Ok(ended)) => {
            result.bytes = ended.bytes;
            result.message_length = ended.message.map_or(0, |message| message.len() as u64);
            result.members = ended.members.len() as u64;
        }
        Some(Err(error)) => {
            let numbers = described(Some(&error));
            result.status = numbers.status;
            result.retryable = numbers.retryable;
            result.destination = numbers.destination;
            keep(error);
        }
    }
    if let Some(out) = out {
        out.put(result);
    }
    Status(result.status)
}

/// How the handle stands, without waiting: KVX_PENDING while it is open, KVX_OK if it ended well, or the code of what
/// ended it, whose message is then this thread's last error too. The result says more; null if it is not wanted.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_handle_poll(handle: kvx_handle, result: *mut kvx_result) -> kvx_status {
    call(|| {
        let going = going(handle)?;
        // SAFETY: the caller's struct, as the crate's contract says.
        let out = unsafe { OutStruct::optional(result)? };
        Ok(told(going.poll(), out))
    })
}

/// As kvx_handle_poll, waiting for the end. May block, up to timeout_ms; KVX_PENDING if it is still open then: nothing may
/// be concluded about its blocks, and waiting again is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_handle_wait(handle: kvx_handle, timeout_ms: u64, result: *mut kvx_result) -> kvx_status {
    call(|| {
        let going = going(handle)?;
        // SAFETY: the caller's struct, as the crate's contract says.
        let out = unsafe { OutStruct::optional(result)? };
        Ok(told(going.wait(input::timeout(timeout_ms)), out))
    })
}

/// The message of what ended the handle: what, where, why, and what to do. Empty while it is open, and if it ended well.
/// Gives the text's length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_handle_error(handle: kvx_handle, buffer: *mut c_char, length: usize) -> i64 {
    call(|| {
        let going = going(handle)?;
        // SAFETY: the caller's buffer, as the crate's contract says.
        let out = unsafe { OutText::new(buffer, length)? };
        let text = match going.poll() {
            Some(Err(error)) => error.to_string(),
            _ => String::new(),
        };
        Ok(out.put(&text))
    })
}

/// The message that came with the arrival of a grant. Gives its length, 0 if there is none (yet); writes it only if it
/// all fits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_handle_message(handle: kvx_handle, buffer: *mut c_void, capacity: usize) -> i64 {
    call(|| {
        let going = going(handle)?;
        // SAFETY: the caller's buffer, as the crate's contract says.
        let out = unsafe { OutBytes::new(buffer, capacity)? };
        Ok(match going.poll() {
            Some(Ok(Ended {
                message: Some(message), ..
            })) => out.put(&message),
            _ => Length(0),
        })
    })
}

/// The verdicts of an offer's claims, once it was released: at most capacity elements of element_size bytes
/// (sizeof(kvx_member)), and in count how many there are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_handle_members(
    handle: kvx_handle,
    members: *mut kvx_member,
    element_size: usize,
    capacity: usize,
    count: *mut usize,
) -> kvx_status {
    call(|| {
        let going = going(handle)?;
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, total) = unsafe {
            (
                OutStructs::new(members, element_size, capacity)?,
                Out::new("count", count)?,
            )
        };
        let all = match going.poll() {
            Some(Ok(ended)) => ended.members,
            _ => Vec::new(),
        };
        for (index, member) in all.iter().enumerate().take(out.capacity()) {
            out.put(index, verdict(member));
        }
        total.put(all.len());
        Ok(())
    })
}

/// The message of the error in one of these verdicts; empty if the bytes are in place. Gives the text's length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_handle_member_error(
    handle: kvx_handle,
    index: u32,
    buffer: *mut c_char,
    capacity: usize,
) -> i64 {
    call(|| {
        let going = going(handle)?;
        // SAFETY: the caller's buffer, as the crate's contract says.
        let out = unsafe { OutText::new(buffer, capacity)? };
        let all = match going.poll() {
            Some(Ok(ended)) => ended.members,
            _ => Vec::new(),
        };
        let member = all
            .get(index as usize)
            .ok_or_else(|| beyond("member", index, all.len()))?;
        let text = match &member.verdict {
            Verdict::Arrived => String::new(),
            Verdict::Failed(error) => error.to_string(),
            Verdict::Unknown => "Unknown: the claim's owner does not remember how it ended".to_owned(),
        };
        Ok(out.put(&text))
    })
}

/// Ends it with KVX_ERR_CANCELLED (no effect once it has ended). Does not wait: its blocks may be reused once the handle
/// has ended, which takes a round trip at most while the peer lives.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_handle_cancel(handle: kvx_handle) -> kvx_status {
    call(|| {
        going(handle)?.cancel();
        Ok(())
    })
}

/// Frees the handle and lets what it stands for go on.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_handle_detach(handle: kvx_handle) -> kvx_status {
    call(|| {
        removed(handle)?.detach();
        Ok(())
    })
}

/// What an open handle waits for (offer, blocks, credit, rail, peer, ...), and in waited_ns for how long, in nanoseconds
/// (null if it is not wanted). Empty once it has ended. Gives the text's length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_handle_waiting_on(
    handle: kvx_handle,
    buffer: *mut c_char,
    capacity: usize,
    waited_ns: *mut u64,
) -> i64 {
    call(|| {
        let going = going(handle)?;
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, waited) = unsafe {
            let waited = (!waited_ns.is_null())
                .then(|| Out::new("waited_ns", waited_ns))
                .transpose()?;
            (OutText::new(buffer, capacity)?, waited)
        };
        let waiting = going.waiting_on();
        if let Some(waited) = waited {
            let since = waiting
                .as_ref()
                .map_or(0, |waiting| now_ns().saturating_sub(waiting.since.as_nanos()));
            waited.put(since);
        }
        Ok(out.put(waiting.as_ref().map_or("", |waiting| waiting.what.as_str())))
    })
}

/// The number that its events carry.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_handle_id(handle: kvx_handle, id: *mut u64) -> kvx_status {
    call(|| {
        let going = going(handle)?;
        // SAFETY: the caller's pointer, as the crate's contract says.
        let out = unsafe { Out::new("id", id)? };
        out.put(going.id());
        Ok(())
    })
}

/// Frees the handle, at once. An open one is cancelled, and nobody learns when its blocks may be reused: to learn it,
/// cancel, wait for the end, then free.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_handle_free(handle: kvx_handle) -> kvx_status {
    call(|| removed(handle).map(drop))
}

fn verdict(member: &MemberVerdict) -> kvx_member {
    let (status, destination) = match &member.verdict {
        Verdict::Arrived => (KVX_OK, KVX_DESTINATION_UNTOUCHED),
        Verdict::Failed(error) => (code(error.kind()), destination(error.destination())),
        Verdict::Unknown => (KVX_ERR_UNKNOWN, KVX_DESTINATION_UNTOUCHED),
    };
    kvx_member {
        struct_size: 0,
        status,
        peer: kvx_id128::of(member.peer.bits()),
        set: kvx_id128::of(member.set),
        member: u32::from(member.member),
        destination,
    }
}

/// Now, on the clock of [`kvxfer::Time`].
fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the struct that it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut time) };
    let (seconds, nanoseconds) = (time.tv_sec as u64, time.tv_nsec as u64);
    seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}

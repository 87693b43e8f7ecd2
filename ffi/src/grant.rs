//! Grants, and what uses them: pushes and pulls.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use kvxfer::{
    Access, Endpoint, Grant, GrantHandle, GrantOptions, Incarnation, Pool, PullOptions, PushOptions, Result, Target,
    Transfer,
};

use crate::address::kvx_id128;
use crate::call::{Length, call};
use crate::endpoint::kvx_endpoint;
use crate::handle::Held;
use crate::input::{self, MESSAGE_BYTES_MAX, PORTABLE_BYTES_MAX, flag, grows, narrow};
use crate::output::{Out, OutBytes, OutStruct, OutText};
use crate::pool::kvx_pool;
use crate::selection::{kvx_target, target};
use crate::status::kvx_status;
use crate::table;

/// Permission to write (or read) exactly certain blocks of a peer's pool, once: what engines pass around. Freed by
/// kvx_grant_free.
pub type kvx_grant = u64;
/// The owner's side of a grant. A kvx_handle.
pub type kvx_grant_handle = u64;
/// A push or a pull under way. A kvx_handle.
pub type kvx_transfer = u64;

/// Which way a grant's bytes go.
pub type kvx_access = u32;
/// The holder may write into the owner's blocks.
pub const KVX_ACCESS_WRITE: kvx_access = 1;
/// The holder may read the owner's blocks.
pub const KVX_ACCESS_READ: kvx_access = 2;

/// Options of a grant. All zeros are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_grant_options {
    /// sizeof(kvx_grant_options).
    pub struct_size: u32,
    /// 1: tell its events, with event_data.
    pub events: u32,
    /// Ends the grant with KVX_ERR_DEADLINE_EXCEEDED. 0: never.
    pub deadline_ms: u64,
    /// Only this peer may use it; zeros: whoever has it.
    pub holder: kvx_id128,
    /// The application's number in its events.
    pub event_data: u64,
}
grows!(kvx_grant_options, 40);

/// Options of a push or a pull. All zeros are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_transfer_options {
    /// sizeof(kvx_transfer_options).
    pub struct_size: u32,
    /// 0 to 255; higher goes first.
    pub priority: u32,
    /// Ends the transfer with KVX_ERR_DEADLINE_EXCEEDED; the grant's own deadline counts too. 0: none.
    pub deadline_ms: u64,
    /// 1: compute and check a checksum of the payload.
    pub checksum: u32,
    /// 1: tell its events, with event_data.
    pub events: u32,
    /// The application's number in its events.
    pub event_data: u64,
    /// Of a push: bytes delivered with the arrival, exactly once; null: none.
    pub message: *const c_void,
    /// How many, at most 64 KiB.
    pub message_length: usize,
    /// Of a push: a CUevent (cudaEvent_t) that what writes the source was recorded before; the source is not read before it
    /// has happened. Captured in the call, as kvx_offer_ready_after does. Null: none. A push that waits can be cancelled
    /// at once.
    pub after: *mut c_void,
}
grows!(kvx_transfer_options, 48, 56);

/// What a grant says.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_grant_info {
    /// sizeof(kvx_grant_info), set by the caller.
    pub struct_size: u32,
    /// Write or read.
    pub access: kvx_access,
    /// Its owner.
    pub owner: kvx_id128,
    /// The owner's pool, as kvx_pool_id says there.
    pub pool: u32,
    /// Its slot: with the generation and the owner, its name.
    pub slot: u32,
    /// Which use of the slot.
    pub generation: u32,
    /// 0.
    pub reserved: u32,
    /// Hash of the pool's geometry, as kvx_layout_describe says.
    pub geometry_hash: u64,
    /// Milliseconds it is good for, counted from when it was made.
    pub remaining_ms: u64,
}
grows!(kvx_grant_info, 56);

/// How a transfer's bytes go.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_path_info {
    /// sizeof(kvx_path_info), set by the caller.
    pub struct_size: u32,
    /// Lanes or rails up; 0 if there is no link to the peer.
    pub rails: u32,
    /// Of how many.
    pub rails_configured: u32,
    /// 0.
    pub reserved: u32,
    /// The transport's name, cut where it does not fit; empty if there is no link.
    pub transport: [c_char; 40],
}
grows!(kvx_path_info, 56);

/// Permits a peer to write exactly these blocks, once. Options may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_pool_grant(
    pool: kvx_pool,
    blocks: *const kvx_target,
    options: *const kvx_grant_options,
    handle: *mut kvx_grant_handle,
) -> kvx_status {
    // SAFETY: the caller's pointers, as the crate's contract says.
    call(|| unsafe { open(pool, blocks, options, handle, Pool::grant) })
}

/// Permits a peer to read exactly these blocks, once. They must hold until the handle has ended. Options may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_pool_serve(
    pool: kvx_pool,
    blocks: *const kvx_target,
    options: *const kvx_grant_options,
    handle: *mut kvx_grant_handle,
) -> kvx_status {
    // SAFETY: the caller's pointers, as the crate's contract says.
    call(|| unsafe { open(pool, blocks, options, handle, Pool::serve) })
}

/// What to hand to the peer that shall use it: a new grant handle for this process; kvx_grant_bytes makes it portable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_grant_handle_grant(handle: kvx_grant_handle, grant: *mut kvx_grant) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointer, as the crate's contract says.
        let out = unsafe { Out::handle("grant", grant)? };
        out.put(table::insert(table::get::<Held<GrantHandle>>(handle)?.grant().clone())?);
        Ok(())
    })
}

/// The portable form. Gives the number of bytes; writes them only if they all fit.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_grant_bytes(grant: kvx_grant, buffer: *mut c_void, capacity: usize) -> i64 {
    call(|| -> Result<Length> {
        let grant = table::get::<Grant>(grant)?;
        // SAFETY: the caller's buffer, as the crate's contract says.
        let out = unsafe { OutBytes::new(buffer, capacity)? };
        Ok(out.put(&grant.to_bytes()?))
    })
}

/// Reads the portable form. What comes from elsewhere is checked here, and again by its owner when it is used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_grant_parse(bytes: *const c_void, length: usize, grant: *mut kvx_grant) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, bytes) = unsafe {
            (
                Out::handle("grant", grant)?,
                input::short_bytes("a grant", bytes, length, PORTABLE_BYTES_MAX)?,
            )
        };
        out.put(table::insert(Grant::from_bytes(bytes)?)?);
        Ok(())
    })
}

/// What it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_grant_describe(grant: kvx_grant, info: *mut kvx_grant_info) -> kvx_status {
    call(|| {
        let grant = table::get::<Grant>(grant)?;
        // SAFETY: the caller's struct, as the crate's contract says.
        let out = unsafe { OutStruct::new(info)? };
        out.put(kvx_grant_info {
            struct_size: 0,
            access: match grant.access {
                Access::Write => KVX_ACCESS_WRITE,
                Access::Read => KVX_ACCESS_READ,
            },
            owner: kvx_id128::of(grant.name.incarnation.bits()),
            pool: grant.pool.0,
            slot: grant.name.slot.0,
            generation: grant.name.generation.0,
            reserved: 0,
            geometry_hash: grant.geometry_hash,
            remaining_ms: grant.remaining_ms,
        });
        Ok(())
    })
}

/// Frees a grant: this process's copy of the permission, not the permission itself.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_grant_free(grant: kvx_grant) -> kvx_status {
    call(|| table::remove::<Grant>(grant).map(drop))
}

/// Writes blocks of ours into the blocks of a grant, with a message if the options have one. Options may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_push(
    endpoint: kvx_endpoint,
    pool: kvx_pool,
    source: *const kvx_target,
    grant: kvx_grant,
    options: *const kvx_transfer_options,
    transfer: *mut kvx_transfer,
) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, source, options, message) = unsafe {
            let options = input::options(options)?;
            let message = input::short_bytes("a message", options.message, options.message_length, MESSAGE_BYTES_MAX)?;
            (Out::handle("transfer", transfer)?, target(source)?, options, message)
        };
        let (found, pool) = (table::get::<Endpoint>(endpoint)?, table::get::<Pool>(pool)?);
        let after = match options.after.is_null() {
            true => None,
            // SAFETY: a live event, as the header says.
            false => Some(unsafe { found.after_cuda_event(options.after)? }),
        };
        let options = PushOptions {
            after,
            message: (!message.is_empty()).then(|| Arc::from(message)),
            priority: narrow("priority", options.priority)?,
            deadline: input::deadline(options.deadline_ms),
            checksum: flag("checksum", options.checksum)?,
            events: flag("events", options.events)?.then_some(options.event_data),
        };
        let begun = found.push(&pool, source, &*table::get::<Grant>(grant)?, options)?;
        out.put(table::insert(Held::new(begun))?);
        Ok(())
    })
}

/// Reads the blocks of a grant to read into blocks of ours. Options may be null; they have no message.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_pull(
    endpoint: kvx_endpoint,
    grant: kvx_grant,
    pool: kvx_pool,
    destination: *const kvx_target,
    options: *const kvx_transfer_options,
    transfer: *mut kvx_transfer,
) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, destination, options) = unsafe {
            (
                Out::handle("transfer", transfer)?,
                target(destination)?,
                input::options(options)?,
            )
        };
        if options.message_length > 0 {
            return Err(
                kvxfer::Error::new(kvxfer::ErrorKind::InvalidArgument, "a pull with a message")
                    .because("nobody is told of a pull's arrival but the one who pulls")
                    .remedy("send the message with a push"),
            );
        }
        if !options.after.is_null() {
            return Err(
                kvxfer::Error::new(kvxfer::ErrorKind::InvalidArgument, "a pull with an event (after)")
                    .because("only what is sent can wait for one")
                    .remedy("pull once the blocks may be written"),
            );
        }
        let (found, pool) = (table::get::<Endpoint>(endpoint)?, table::get::<Pool>(pool)?);
        let options = PullOptions {
            priority: narrow("priority", options.priority)?,
            deadline: input::deadline(options.deadline_ms),
            checksum: flag("checksum", options.checksum)?,
            events: flag("events", options.events)?.then_some(options.event_data),
        };
        let begun = found.pull(&*table::get::<Grant>(grant)?, &pool, destination, options)?;
        out.put(table::insert(Held::new(begun))?);
        Ok(())
    })
}

/// How its bytes go, in numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_transfer_path_info(transfer: kvx_transfer, info: *mut kvx_path_info) -> kvx_status {
    call(|| {
        let transfer = table::get::<Held<Transfer>>(transfer)?;
        // SAFETY: the caller's struct, as the crate's contract says.
        let out = unsafe { OutStruct::new(info)? };
        let mut path_info = input::defaults::<kvx_path_info>();
        if let Some(path) = transfer.path() {
            path_info.rails = u32::try_from(path.rails.len()).unwrap_or(u32::MAX);
            path_info.rails_configured = u32::try_from(path.rails_configured).unwrap_or(u32::MAX);
            path_info.transport = crate::output::field(&path.transport);
        }
        out.put(path_info);
        Ok(())
    })
}

/// The way its bytes take, in words: transport and rails, one line each. Empty while there is no link to the peer. Gives
/// the text's length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_transfer_path(transfer: kvx_transfer, buffer: *mut c_char, capacity: usize) -> i64 {
    call(|| {
        let transfer = table::get::<Held<Transfer>>(transfer)?;
        // SAFETY: the caller's buffer, as the crate's contract says.
        let out = unsafe { OutText::new(buffer, capacity)? };
        let Some(path) = transfer.path() else {
            return Ok(out.put(""));
        };
        let (up, of) = (path.rails.len(), path.rails_configured);
        let mut lines = vec![format!("{}, {up} of {of} rails up", path.transport)];
        lines.extend(path.rails.iter().map(|rail| format!("  {rail}")));
        lines.extend(path.rails_down.iter().map(|why| format!("  not up: {why}")));
        Ok(out.put(&lines.join("\n")))
    })
}

/// # Safety
/// The pointers are the caller's, as the header says.
unsafe fn open(
    pool: kvx_pool,
    blocks: *const kvx_target,
    options: *const kvx_grant_options,
    handle: *mut kvx_grant_handle,
    permit: impl FnOnce(&Pool, Target, GrantOptions) -> Result<GrantHandle>,
) -> Result<()> {
    // SAFETY: the caller's word.
    let (out, target, options) = unsafe {
        (
            Out::handle("handle", handle)?,
            target(blocks)?,
            input::options(options)?,
        )
    };
    let pool = table::get::<Pool>(pool)?;
    let options = GrantOptions {
        deadline: input::deadline(options.deadline_ms),
        holder: options.holder.bits().map(Incarnation::from_bits),
        events: flag("events", options.events)?.then_some(options.event_data),
    };
    out.put(table::insert(Held::new(permit(&pool, target, options)?))?);
    Ok(())
}

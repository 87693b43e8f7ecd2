//! Hand-offs: offers meet claims under a key.

use std::ffi::c_void;

use kvxfer::{After, Claim, ClaimOptions, Endpoint, Error, Offer, OfferOptions, Pool, Result};

use crate::address::{addresses, kvx_address, kvx_id128};
use crate::call::{Status, call};
use crate::endpoint::kvx_endpoint;
use crate::handle::Held;
use crate::input::{self, KEY_BYTES_MAX, flag, grows, narrow};
use crate::output::Out;
use crate::pool::kvx_pool;
use crate::selection::{kvx_group_selection, selection};
use crate::status::{KVX_OK, KVX_PENDING, kvx_status};
use crate::table;

/// A request's KV, offered to whoever claims its key. A kvx_handle.
pub type kvx_offer = u64;
/// A request's KV, wanted from the endpoints that offer its key. A kvx_handle.
pub type kvx_claim = u64;

/// Options of an offer. All zeros are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_offer_options {
    /// sizeof(kvx_offer_options).
    pub struct_size: u32,
    /// Claim sets served before the offer is released (0 stands for 1). One more gets KVX_ERR_ALREADY_CLAIMED.
    pub readers: u32,
    /// Ends the offer with KVX_ERR_UNCLAIMED if no claim came by then, KVX_ERR_DEADLINE_EXCEEDED if one did. 0: the
    /// configuration's deadlines.unmatched_ms, until a claim comes.
    pub deadline_ms: u64,
    /// 0 to 255; higher goes first.
    pub priority: u32,
    /// 1: compute and check a checksum of the payload.
    pub checksum: u32,
    /// 1: tell its events, with event_data.
    pub events: u32,
    /// 0.
    pub reserved: u32,
    /// The application's number in its events.
    pub event_data: u64,
}
grows!(kvx_offer_options, 40);

/// Options of a claim. All zeros are the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_claim_options {
    /// sizeof(kvx_claim_options).
    pub struct_size: u32,
    /// 1: this endpoint asks for the bytes, part by part, and has them validated, instead of being sent them.
    pub pull: u32,
    /// The claim set, the same for all ranks of one reader; zeros: a set of its own.
    pub set: kvx_id128,
    /// This claim's number in its set, from 0.
    pub member: u16,
    /// How many endpoints of the set contact each offer (0 stands for 1).
    pub members: u16,
    /// 1: tell its events, with event_data.
    pub events: u32,
    /// Ends the claim with KVX_ERR_UNCLAIMED if nothing met it by then, KVX_ERR_DEADLINE_EXCEEDED if something did. 0: the
    /// configuration's deadlines.unmatched_ms, until it is met.
    pub deadline_ms: u64,
    /// The application's number in its events.
    pub event_data: u64,
}
grows!(kvx_claim_options, 48);

/// A part of an offer, released for sending.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_part {
    /// sizeof(kvx_part), the same in every element.
    pub struct_size: u32,
    /// First token.
    pub first_token: u32,
    /// The offer.
    pub offer: kvx_offer,
    /// One past the last token.
    pub token_end: u32,
    /// First layer, as an index in the pool's layers.
    pub first_layer: u32,
    /// One past the last layer; 0, with first_layer 0: all layers.
    pub layer_end: u32,
    /// 0.
    pub reserved: u32,
}
grows!(kvx_part, 32);

/// Offers a request's KV under a key of at most 256 bytes, before or after it is claimed.
/// KVX_ERR_DUPLICATE_KEY if a live offer has the key; KVX_ERR_BUSY at a limit. Options may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_offer_open(
    endpoint: kvx_endpoint,
    key: *const c_void,
    key_length: usize,
    pool: kvx_pool,
    options: *const kvx_offer_options,
    offer: *mut kvx_offer,
) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, key, options) = unsafe {
            (
                Out::handle("offer", offer)?,
                input::short_bytes("a key", key, key_length, KEY_BYTES_MAX)?,
                input::options(options)?,
            )
        };
        let (found, pool) = (table::get::<Endpoint>(endpoint)?, table::get::<Pool>(pool)?);
        let options = OfferOptions {
            readers: narrow("readers", options.readers.max(1))?,
            deadline: input::deadline(options.deadline_ms),
            priority: narrow("priority", options.priority)?,
            checksum: flag("checksum", options.checksum)?,
            events: flag("events", options.events)?.then_some(options.event_data),
        };
        let opened = found.offer(key, &pool, options)?;
        out.put(table::insert(Held::new(opened))?);
        Ok(())
    })
}

/// Appends blocks: in each cache group, tokens go on where the last append ended. Where the last block was not full, its
/// id comes first again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_offer_append(
    offer: kvx_offer,
    groups: *const kvx_group_selection,
    group_count: usize,
) -> kvx_status {
    call(|| {
        let offer = table::get::<Held<Offer>>(offer)?;
        // SAFETY: the caller's arrays, as the crate's contract says.
        let selection = unsafe { selection(groups, group_count)? };
        offer.append(selection)
    })
}

/// Releases a part for sending: these tokens of these layers (indices in the pool's layers; 0 to 0 stands for all). Its
/// bytes are final now.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_offer_ready(
    offer: kvx_offer,
    first_token: u32,
    token_end: u32,
    first_layer: u32,
    layer_end: u32,
) -> kvx_status {
    call(|| {
        let offer = table::get::<Held<Offer>>(offer)?;
        offer.ready(first_token..token_end, layers(first_layer, layer_end)?)
    })
}

/// As kvx_offer_ready, for bytes that kernels are still to write: event is a CUevent (cudaEvent_t) recorded behind them.
/// Everything is checked now, and the part is read once the event has happened. The event is captured as it is in this
/// call: it may be recorded again or destroyed afterwards. No stream and no device is waited for. One that fails ends the
/// offer. KVX_ERR_INVALID_ARGUMENT for null and inside a stream capture, KVX_ERR_UNSUPPORTED without a CUDA driver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_offer_ready_after(
    offer: kvx_offer,
    first_token: u32,
    token_end: u32,
    first_layer: u32,
    layer_end: u32,
    event: *mut c_void,
) -> kvx_status {
    call(|| {
        let offer = table::get::<Held<Offer>>(offer)?;
        let layers = layers(first_layer, layer_end)?;
        // SAFETY: null is refused; else a live event, as the header says.
        let after = unsafe { offer.after_cuda_event(event)? };
        offer.ready_after(first_token..token_end, layers, &after)
    })
}

/// kvx_offer_ready for a whole step of several requests of one endpoint, with one look at the control plane. Stops at the
/// first refusal: parts before it are released, those after it are not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_ready_many(
    endpoint: kvx_endpoint,
    parts: *const kvx_part,
    part_count: usize,
) -> kvx_status {
    // SAFETY: the caller's array, as the crate's contract says.
    call(|| unsafe { ready_many(endpoint, parts, part_count, None) })
}

/// kvx_ready_many with one event for the whole step, as kvx_offer_ready_after takes it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_ready_many_after(
    endpoint: kvx_endpoint,
    parts: *const kvx_part,
    part_count: usize,
    event: *mut c_void,
) -> kvx_status {
    call(|| {
        let found = table::get::<Endpoint>(endpoint)?;
        // SAFETY: null is refused; else a live event, as the header says.
        let after = unsafe { found.after_cuda_event(event)? };
        // SAFETY: the caller's array, as the crate's contract says.
        unsafe { ready_many(endpoint, parts, part_count, Some(&after)) }
    })
}

/// # Safety
/// `parts` is what [`input::structs`] takes.
unsafe fn ready_many(
    endpoint: kvx_endpoint,
    parts: *const kvx_part,
    part_count: usize,
    after: Option<&After>,
) -> Result<()> {
    let found = table::get::<Endpoint>(endpoint)?;
    // SAFETY: the caller's word.
    let parts = unsafe { input::structs(parts, part_count)? };
    let mut offers = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        let place = |error: Error| error.at(format!("part {index}"));
        let offer = table::get::<Held<Offer>>(part.offer).map_err(place)?;
        offers.push((offer, layers(part.first_layer, part.layer_end).map_err(place)?));
    }
    let ready = offers.iter().zip(&parts);
    let ready: Vec<_> = ready
        .map(|((offer, layers), part)| (&***offer, part.first_token..part.token_end, layers.clone()))
        .collect();
    match after {
        Some(after) => found.ready_many_after(&ready, after),
        None => found.ready_many(&ready),
    }
}

/// No more blocks come: the request has token_end tokens. What has not been released is now, with the state blocks.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_offer_finish(offer: kvx_offer, token_end: u32) -> kvx_status {
    call(|| table::get::<Held<Offer>>(offer)?.finish(token_end))
}

/// As kvx_offer_finish, and what it releases, state blocks included, waits for the event, as kvx_offer_ready_after takes it.
/// What was released before keeps to its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_offer_finish_after(offer: kvx_offer, token_end: u32, event: *mut c_void) -> kvx_status {
    call(|| {
        let offer = table::get::<Held<Offer>>(offer)?;
        // SAFETY: null is refused; else a live event, as the header says.
        let after = unsafe { offer.after_cuda_event(event)? };
        offer.finish_after(token_end, &after)
    })
}

/// Voids all progress: bytes of earlier attempts never count. Blocks are appended anew. Those of earlier attempts may be
/// overwritten once kvx_offer_voided says so.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_offer_restart(offer: kvx_offer) -> kvx_status {
    call(|| table::get::<Held<Offer>>(offer)?.restart())
}

/// KVX_OK if no block of an earlier attempt is being read any more, KVX_PENDING if one is: a few milliseconds at most.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_offer_voided(offer: kvx_offer) -> kvx_status {
    call(|| {
        let voided = table::get::<Held<Offer>>(offer)?.voided();
        Ok(Status(if voided { KVX_OK } else { KVX_PENDING }))
    })
}

/// Takes blocks back: when this returns, nothing read from them later counts, and they may be reused. The offer ends with
/// KVX_ERR_RETRACTED. May block for reads that are inside a system call, at most for the configuration's
/// deadlines.retract_ms_max (100 ms if it does not say): KVX_ERR_DEADLINE_EXCEEDED then, and the blocks must not be reused
/// until the offer has ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_offer_retract(offer: kvx_offer, blocks: *const u32, block_count: usize) -> kvx_status {
    call(|| {
        let offer = table::get::<Held<Offer>>(offer)?;
        // SAFETY: the caller's array, as the crate's contract says.
        let blocks = unsafe { input::array("blocks", blocks, block_count)? };
        offer.retract(blocks)
    })
}

/// Claims a request's KV from all endpoints that hold some of it, before or after they offer it. The library finds out
/// which of them sends what. Options may be null. What peers say ends the claim.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_claim_open(
    endpoint: kvx_endpoint,
    key: *const c_void,
    key_length: usize,
    pool: kvx_pool,
    sources: *const kvx_address,
    source_count: usize,
    options: *const kvx_claim_options,
    claim: *mut kvx_claim,
) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, key, sources, options) = unsafe {
            (
                Out::handle("claim", claim)?,
                input::short_bytes("a key", key, key_length, KEY_BYTES_MAX)?,
                addresses(sources, source_count)?,
                input::options(options)?,
            )
        };
        let (found, pool) = (table::get::<Endpoint>(endpoint)?, table::get::<Pool>(pool)?);
        let options = ClaimOptions {
            set: options.set.bits(),
            member: options.member,
            members: options.members.max(1),
            deadline: input::deadline(options.deadline_ms),
            pull: flag("pull", options.pull)?,
            events: flag("events", options.events)?.then_some(options.event_data),
        };
        let opened = found.claim(key, &pool, &sources, options)?;
        out.put(table::insert(Held::new(opened))?);
        Ok(())
    })
}

/// Says where the bytes go: per cache group the tokens wanted and the blocks for them. Tokens that are held already are
/// simply not selected. Once per claim.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_claim_fill(
    claim: kvx_claim,
    groups: *const kvx_group_selection,
    group_count: usize,
) -> kvx_status {
    call(|| {
        let claim = table::get::<Held<Claim>>(claim)?;
        // SAFETY: the caller's arrays, as the crate's contract says.
        let selection = unsafe { selection(groups, group_count)? };
        claim.fill(selection)
    })
}

/// Ends the claim before it is filled: KVX_ERR_DECLINED at both sides. No effect after that.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_claim_decline(claim: kvx_claim) -> kvx_status {
    call(|| {
        table::get::<Held<Claim>>(claim)?.decline();
        Ok(())
    })
}

/// Lets a CUDA stream (CUstream, cudaStream_t; null is the default stream) wait, from its present end on, until the claim
/// has ended: arrived or not, which kvx_handle_poll says. Kernels queued behind it read the blocks after the arrival. The
/// stream goes on at the claim's deadline and when the endpoint is closed, too. What makes the claim end must not be queued
/// behind it. KVX_ERR_INVALID_ARGUMENT inside a stream capture; KVX_ERR_UNSUPPORTED without a CUDA driver that can do it;
/// KVX_ERR_BUSY if too many streams wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_claim_hold_stream(claim: kvx_claim, stream: *mut c_void) -> kvx_status {
    call(|| {
        let claim = table::get::<Held<Claim>>(claim)?;
        // SAFETY: a live stream, as the header says.
        unsafe { claim.hold_stream(stream) }
    })
}

/// The layers of a part: 0 to 0 stands for all.
fn layers(first: u32, end: u32) -> Result<std::ops::Range<u16>> {
    match (first, end) {
        // An end beyond the last layer means the last.
        (0, 0) => Ok(0..u16::MAX),
        (first, end) => Ok(narrow("first_layer", first)?..u16::try_from(end).unwrap_or(u16::MAX)),
    }
}

//! Handles that are none, freed, of another kind, of another thread or of a destroyed endpoint: each is a status and a
//! message, and nothing else happens.

#[macro_use]
mod support;

use std::ffi::{c_char, c_void};
use std::mem::size_of;
use std::ptr::{null, null_mut};

use kvxfer_ffi::*;
use support::*;

/// Calls every function that takes a handle with this one in every place, and valid arguments otherwise.
fn everywhere(handle: u64, mut check: impl FnMut(&str, i64)) {
    let mut number = 0u64;
    let (mut small, mut length) = (0u32, 0usize);
    let (text, size) = (null_mut::<c_char>(), 0usize);
    let (bytes, key) = (null_mut::<c_void>(), c"key".as_ptr());
    let one = [1u32];
    let selection = blocks(0, &one);
    let what = target(&selection);
    let mut id = kvx_id128::default();
    let mut fd = 0;
    macro_rules! all {
        ($($name:ident($($argument:expr),*);)*) => {
            $(
                #[allow(unused_unsafe)]
                let status = c! { $name($($argument),*) };
                check(stringify!($name), i64::from(status));
            )*
        };
    }
    all! {
        kvx_config_set(handle, key, key);
        kvx_config_set_rank(handle, 0, 1, 0, 1);
        kvx_config_check(handle);
        kvx_config_free(handle);
        kvx_address_text(handle, text, size);
        kvx_address_bytes(handle, bytes, size);
        kvx_address_describe(handle, &mut sized());
        kvx_address_free(handle);
        kvx_endpoint_name(handle, text, size);
        kvx_endpoint_incarnation(handle, &mut id);
        kvx_endpoint_address(handle, &mut number);
        kvx_endpoint_connect(handle, handle, 0);
        kvx_endpoint_explain(handle, handle, text, size);
        kvx_endpoint_peers(handle, null_mut(), size_of::<kvx_peer>(), 0, &mut length);
        kvx_endpoint_metrics(handle, text, size);
        kvx_endpoint_drain(handle, 0);
        kvx_endpoint_close(handle, 0);
        kvx_endpoint_destroy(handle, 0);
        kvx_layout_describe(handle, &mut sized());
        kvx_layout_layer_name(handle, 0, text, size);
        kvx_layout_layer_index(handle, key, &mut small);
        kvx_layout_region_length(handle, 0, &mut number);
        kvx_layout_plane(handle, 0, &mut sized());
        kvx_layout_free(handle);
        kvx_pool_register(handle, handle, null(), 0, KVX_ROLE_BOTH, &mut number);
        kvx_pool_allocate(handle, handle, KVX_ROLE_BOTH, &mut number);
        kvx_pool_layout(handle, &mut number);
        kvx_pool_region(handle, 0, &mut sized());
        kvx_pool_regions(handle, null_mut(), size_of::<kvx_region_info>(), 0, &mut length);
        kvx_pool_id(handle, &mut small, null_mut());
        kvx_pool_copy_in(handle, 0, 0, 0, bytes, 0);
        kvx_pool_copy_out(handle, 0, 0, 0, bytes, 0);
        kvx_pool_close(handle);
        kvx_pool_close_wait(handle, 0);
        kvx_pool_suspend(handle);
        kvx_pool_resume(handle);
        kvx_pool_free(handle);
        kvx_handle_poll(handle, null_mut());
        kvx_handle_wait(handle, 0, null_mut());
        kvx_handle_error(handle, text, size);
        kvx_handle_message(handle, bytes, size);
        kvx_handle_members(handle, null_mut(), size_of::<kvx_member>(), 0, &mut length);
        kvx_handle_member_error(handle, 0, text, size);
        kvx_handle_cancel(handle);
        kvx_handle_waiting_on(handle, text, size, null_mut());
        kvx_handle_id(handle, &mut number);
        kvx_handle_detach(handle);
        kvx_handle_free(handle);
        kvx_offer_open(handle, key.cast(), 3, handle, null(), &mut number);
        kvx_offer_append(handle, &selection, 1);
        kvx_offer_ready(handle, 0, 1, 0, 0);
        kvx_offer_finish(handle, 1);
        kvx_offer_restart(handle);
        kvx_offer_voided(handle);
        kvx_offer_retract(handle, one.as_ptr(), 1);
        kvx_ready_many(handle, null(), 0);
        kvx_claim_open(handle, key.cast(), 3, handle, null(), 0, null(), &mut number);
        kvx_claim_fill(handle, &selection, 1);
        kvx_claim_decline(handle);
        kvx_pool_grant(handle, &what, null(), &mut number);
        kvx_pool_serve(handle, &what, null(), &mut number);
        kvx_grant_handle_grant(handle, &mut number);
        kvx_grant_bytes(handle, bytes, size);
        kvx_grant_describe(handle, &mut sized());
        kvx_grant_free(handle);
        kvx_push(handle, handle, &what, handle, null(), &mut number);
        kvx_pull(handle, handle, handle, &what, null(), &mut number);
        kvx_transfer_path_info(handle, &mut sized());
        kvx_transfer_path(handle, text, size);
        kvx_events_drain(handle, null_mut(), size_of::<kvx_event>(), 0, &mut length);
        kvx_events_fd(handle, &mut fd);
        kvx_events_wait(handle, 0);
    }
    // A config of 0 stands for the defaults.
    if handle != 0 {
        all! { kvx_endpoint_create(handle, &mut number); }
    }
}

#[test]
fn no_function_takes_what_is_not_a_handle() {
    for handle in [
        0,
        1,
        0xff,
        u64::MAX,
        0x04ff_ffff_ff00_0000,
        0x0aff_fff0_0000_0000,
        1 << 63,
    ] {
        everywhere(handle, |name, status| {
            assert_eq!(status, i64::from(KVX_ERR_INVALID_ARGUMENT), "{name}({handle:#x})");
            assert!(last_error().contains(" as a"), "{name}: {}", last_error());
        });
    }
}

#[test]
fn no_function_takes_a_handle_that_was_freed() {
    let pair = pair();
    let (offer, claim) = (pair.offer("freed"), pair.claim("freed"));
    let (endpoint, pool) = (endpoint(c"freed"), pool(pair.prefill, KVX_ROLE_BOTH));
    let (layout, address) = (opaque(), address(pair.prefill));
    for handle in [offer, claim] {
        ok(kvx_handle_free(handle));
    }
    ok(kvx_pool_free(pool));
    ok(kvx_layout_free(layout));
    ok(kvx_address_free(address));
    ok(kvx_endpoint_destroy(endpoint, LONG_MS));
    for handle in [offer, claim, endpoint, pool, layout, address] {
        everywhere(handle, |name, status| {
            assert_eq!(status, i64::from(KVX_ERR_INVALID_ARGUMENT), "{name}({handle:#x})");
        });
    }
    refused(kvx_handle_free(offer), KVX_ERR_INVALID_ARGUMENT, "it was freed");
    refused(
        kvx_endpoint_destroy(endpoint, 0),
        KVX_ERR_INVALID_ARGUMENT,
        "it was freed",
    );
}

#[test]
fn no_function_takes_a_handle_of_another_kind() {
    let pair = pair();
    let offer = pair.offer("another kind");
    let mut parsed = 0;
    refused(
        kvx_endpoint_close(offer, 0),
        KVX_ERR_INVALID_ARGUMENT,
        "it is an offer handle",
    );
    refused(
        kvx_claim_decline(offer),
        KVX_ERR_INVALID_ARGUMENT,
        "it is an offer handle",
    );
    refused(
        kvx_handle_cancel(pair.source),
        KVX_ERR_INVALID_ARGUMENT,
        "it is a pool handle",
    );
    refused(
        kvx_pool_close(pair.prefill),
        KVX_ERR_INVALID_ARGUMENT,
        "it is an endpoint handle",
    );
    refused(
        c! { kvx_endpoint_create(offer, &mut parsed) },
        KVX_ERR_INVALID_ARGUMENT,
        "it is an offer handle",
    );
    let key = c"k".as_ptr().cast();
    let swapped = c! { kvx_offer_open(pair.source, key, 1, pair.prefill, null(), &mut parsed) };
    refused(
        swapped,
        KVX_ERR_INVALID_ARGUMENT,
        "as an endpoint handle: it is a pool handle",
    );
    // A pool of another endpoint.
    let foreign = c! { kvx_offer_open(pair.decode, key, 1, pair.source, null(), &mut parsed) };
    refused(foreign, KVX_ERR_NOT_REGISTERED, "prefill-0");
    // Nothing of that did anything to it.
    assert_eq!(c! { kvx_handle_poll(offer, null_mut()) }, KVX_PENDING);
    ok(kvx_handle_free(offer));
}

#[test]
fn a_handle_is_good_on_every_thread() {
    let pair = pair();
    let offer = pair.offer("elsewhere");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(c! { kvx_handle_poll(offer, null_mut()) }, KVX_PENDING));
        }
    });
    std::thread::spawn(move || ok(kvx_handle_cancel(offer))).join().unwrap();
    assert_eq!(end(offer).status, KVX_ERR_CANCELLED);
    std::thread::spawn(move || ok(kvx_handle_free(offer))).join().unwrap();
    refused(kvx_handle_free(offer), KVX_ERR_INVALID_ARGUMENT, "freed");
}

/// The handles of what an endpoint had outlive it: each call says that it is closed, and each can be freed.
#[test]
fn what_is_left_of_a_destroyed_endpoint() {
    let endpoint = endpoint(c"destroyed");
    let pool = pool(endpoint, KVX_ROLE_BOTH);
    let (mut offer, mut owned, mut made) = (0, 0, 0);
    let one = [1u32];
    let selection = blocks(0, &one);
    c! {
        ok(kvx_offer_open(
            endpoint,
            c"k".as_ptr().cast(),
            1,
            pool,
            null(),
            &mut offer,
        ));
        ok(kvx_pool_grant(pool, &target(&selection), null(), &mut owned));
    }
    ok(kvx_endpoint_destroy(endpoint, LONG_MS));
    let gone = c! { kvx_offer_open(endpoint, c"k".as_ptr().cast(), 1, pool, null(), &mut made) };
    refused(gone, KVX_ERR_INVALID_ARGUMENT, "it was freed");
    assert_eq!(end(offer).status, KVX_ERR_CLOSED);
    assert_eq!(end(owned).status, KVX_ERR_CLOSED);
    c! {
        refused(kvx_offer_append(offer, &selection, 1), KVX_ERR_CLOSED, "");
        refused(
            kvx_pool_grant(pool, &target(&selection), null(), &mut made),
            KVX_ERR_CLOSED,
            "",
        );
    }
    refused(kvx_offer_finish(offer, 1), KVX_ERR_CLOSED, "");
    ok(kvx_handle_cancel(offer));
    for handle in [offer, owned] {
        ok(kvx_handle_free(handle));
    }
    ok(kvx_pool_free(pool));
}

//! Texts, lengths, structs and values that cannot be: each is a status and a message, and nothing else happens.

#[macro_use]
mod support;

use std::ffi::{CString, c_char};
use std::mem::size_of;
use std::ptr::{null, null_mut};

use kvxfer_ffi::*;
use support::*;

#[test]
fn texts_that_are_none() {
    let mut made = 7;
    let long = CString::new("x".repeat(5000)).unwrap();
    let very_long = CString::new("#".repeat((1 << 20) + 1)).unwrap();
    let not_utf8 = c"name\xff".as_ptr();
    c! {
        refused(
            kvx_config_from_toml(null(), &mut made),
            KVX_ERR_INVALID_ARGUMENT,
            "text: the pointer is null",
        );
        assert_eq!(made, 0);
        refused(
            kvx_config_from_toml(not_utf8, &mut made),
            KVX_ERR_INVALID_ARGUMENT,
            "not UTF-8 from byte 4 on",
        );
        refused(
            kvx_config_from_toml(very_long.as_ptr(), &mut made),
            KVX_ERR_INVALID_ARGUMENT,
            "1048576 bytes",
        );
        refused(
            kvx_config_from_toml(c"slots = ".as_ptr(), &mut made),
            KVX_ERR_INVALID_ARGUMENT,
            "TOML",
        );
        refused(
            kvx_config_load(null(), &mut made),
            KVX_ERR_INVALID_ARGUMENT,
            "path: the pointer is null",
        );
        refused(
            kvx_config_load(long.as_ptr(), &mut made),
            KVX_ERR_INVALID_ARGUMENT,
            "more than 4096 bytes",
        );
        refused(kvx_address_parse(null(), &mut made), KVX_ERR_INVALID_ARGUMENT, "null");
        refused(
            kvx_address_parse(not_utf8, &mut made),
            KVX_ERR_INVALID_ARGUMENT,
            "UTF-8",
        );
        refused(
            kvx_address_parse(long.as_ptr(), &mut made),
            KVX_ERR_INVALID_ARGUMENT,
            "more than 4096 bytes",
        );
        ok(kvx_config_from_toml(c"".as_ptr(), &mut made));
        let (key, value) = (c"name".as_ptr(), c"x".as_ptr());
        refused(
            kvx_config_set(made, null(), value),
            KVX_ERR_INVALID_ARGUMENT,
            "key: the pointer is null",
        );
        refused(
            kvx_config_set(made, key, null()),
            KVX_ERR_INVALID_ARGUMENT,
            "value: the pointer is null",
        );
        refused(kvx_config_set(made, not_utf8, value), KVX_ERR_INVALID_ARGUMENT, "UTF-8");
        refused(kvx_config_set(made, key, not_utf8), KVX_ERR_INVALID_ARGUMENT, "UTF-8");
        refused(
            kvx_config_set(made, long.as_ptr(), value),
            KVX_ERR_INVALID_ARGUMENT,
            "more than 256 bytes",
        );
        refused(
            kvx_config_set(made, key, long.as_ptr()),
            KVX_ERR_INVALID_ARGUMENT,
            "more than 4096 bytes",
        );
    }
    ok(kvx_config_free(made));

    let (layout, mut index) = (opaque(), 0);
    c! {
        refused(
            kvx_layout_layer_index(layout, null(), &mut index),
            KVX_ERR_INVALID_ARGUMENT,
            "null",
        );
        refused(
            kvx_layout_layer_index(layout, not_utf8, &mut index),
            KVX_ERR_INVALID_ARGUMENT,
            "UTF-8",
        );
        let mut preset: kvx_preset_spec = sized();
        refused(
            kvx_layout_preset(&preset, &mut made),
            KVX_ERR_INVALID_ARGUMENT,
            "model: the pointer is null",
        );
        preset.model = not_utf8;
        refused(kvx_layout_preset(&preset, &mut made), KVX_ERR_INVALID_ARGUMENT, "UTF-8");
    }
    ok(kvx_layout_free(layout));
}

#[test]
fn keys_and_bytes_that_are_none() {
    let pair = pair();
    let mut made = 7;
    let key = [b'k'; 300];
    let mut offer = |key: *const u8, length, says: &str| {
        let status = c! { kvx_offer_open(pair.prefill, key.cast(), length, pair.source, null(), &mut made) };
        refused(status, KVX_ERR_INVALID_ARGUMENT, says);
        assert_eq!(made, 0);
        let sources = &raw const pair.address;
        let (endpoint, pool) = (pair.decode, pair.destination);
        let status = c! { kvx_claim_open(endpoint, key.cast(), length, pool, sources, 1, null(), &mut made) };
        refused(status, KVX_ERR_INVALID_ARGUMENT, says);
    };
    offer(null(), 3, "a key: the pointer is null");
    offer(key.as_ptr(), 300, "256");
    offer(key.as_ptr(), 0, "1 to 256");
    offer(key.as_ptr(), usize::MAX, "at most 256");
    offer(key.as_ptr(), isize::MAX as usize, "at most 256");
    // A key need not be text.
    let status = c! {
        kvx_offer_open(
            pair.prefill,
            [0xffu8, 0].as_ptr().cast(),
            2,
            pair.source,
            null(),
            &mut made,
        )
    };
    ok(status);
    ok(kvx_handle_free(made));

    c! {
        let bytes = key.as_ptr().cast();
        let copy = |length, bytes| kvx_pool_copy_in(pair.source, 0, 0, 0, bytes, length);
        refused(copy(4, null()), KVX_ERR_INVALID_ARGUMENT, "null");
        refused(copy(usize::MAX, bytes), KVX_ERR_INVALID_ARGUMENT, "address space");
        let copy = |length, bytes| kvx_pool_copy_out(pair.source, 0, 0, 0, bytes, length);
        refused(copy(4, null_mut()), KVX_ERR_INVALID_ARGUMENT, "null");
        refused(
            copy(usize::MAX, bytes.cast_mut()),
            KVX_ERR_INVALID_ARGUMENT,
            "address space",
        );
        refused(
            kvx_pool_copy_in(pair.source, 0, 0, u32::MAX, bytes, 8),
            KVX_ERR_OUT_OF_BOUNDS,
            "offset",
        );
        refused(
            kvx_pool_copy_in(pair.source, 9, 0, 0, bytes, 8),
            KVX_ERR_OUT_OF_BOUNDS,
            "plane 9",
        );
        refused(kvx_grant_parse(null(), 8, &mut made), KVX_ERR_INVALID_ARGUMENT, "null");
        refused(kvx_grant_parse(bytes, 0, &mut made), KVX_ERR_INVALID_ARGUMENT, "grant");
        refused(
            kvx_grant_parse(bytes, 300, &mut made),
            KVX_ERR_INVALID_ARGUMENT,
            "grant",
        );
        refused(
            kvx_address_from_bytes(bytes, 300, &mut made),
            KVX_ERR_INVALID_ARGUMENT,
            "address",
        );
        refused(
            kvx_address_from_bytes(null(), 3, &mut made),
            KVX_ERR_INVALID_ARGUMENT,
            "null",
        );
        // Buffers to write to.
        let text = null_mut::<c_char>();
        refused(
            kvx_endpoint_name(pair.prefill, text, 5),
            KVX_ERR_INVALID_ARGUMENT,
            "buffer",
        );
        refused(
            kvx_endpoint_name(pair.prefill, 8 as *mut c_char, usize::MAX),
            KVX_ERR_INVALID_ARGUMENT,
            "address space",
        );
        refused(
            kvx_address_bytes(pair.address, null_mut(), 5),
            KVX_ERR_INVALID_ARGUMENT,
            "buffer",
        );
        assert_eq!(
            kvx_last_error_message(null_mut(), 5),
            i64::from(KVX_ERR_INVALID_ARGUMENT)
        );
        assert_eq!(kvx_last_error(null_mut()), KVX_ERR_INVALID_ARGUMENT);
        let mut one = [7 as c_char];
        assert_eq!(kvx_endpoint_name(pair.prefill, one.as_mut_ptr(), 1), 9);
        assert_eq!(one, [0]);
    }
}

#[test]
fn places_to_write_to_that_are_none() {
    let pair = pair();
    let offer = pair.offer("outputs");
    let null_says = |status: i32| refused(status, KVX_ERR_INVALID_ARGUMENT, "null");
    c! {
        null_says(kvx_config_create(null_mut()));
        null_says(kvx_endpoint_create(0, null_mut()));
        null_says(kvx_endpoint_address(pair.prefill, null_mut()));
        null_says(kvx_endpoint_incarnation(pair.prefill, null_mut()));
        null_says(kvx_endpoint_peers(
            pair.prefill,
            null_mut(),
            size_of::<kvx_peer>(),
            0,
            null_mut(),
        ));
        null_says(kvx_endpoint_peers(
            pair.prefill,
            null_mut(),
            size_of::<kvx_peer>(),
            2,
            &mut 0,
        ));
        null_says(kvx_layout_opaque(1, 1, null_mut()));
        null_says(kvx_layout_create(null(), &mut 0));
        null_says(kvx_layout_preset(null(), &mut 0));
        null_says(kvx_pool_region(pair.source, 0, null_mut()));
        null_says(kvx_pool_grant(pair.source, null(), null(), &mut 0));
        null_says(kvx_handle_id(offer, null_mut()));
        null_says(kvx_events_drain(
            pair.prefill,
            null_mut(),
            size_of::<kvx_event>(),
            1,
            &mut 0,
        ));
        null_says(kvx_events_fd(pair.prefill, null_mut()));
        let odd = (&raw mut *Box::leak(Box::new([0u64; 2]))).cast::<u64>().byte_add(1);
        refused(kvx_config_create(odd), KVX_ERR_INVALID_ARGUMENT, "aligned");
    }
    ok(kvx_handle_free(offer));
}

#[test]
fn structs_of_an_unknown_size() {
    let pair = pair();
    let offer = pair.offer("sizes");
    let mut made = 0;
    /// A struct, and room behind it for what a later version may have.
    #[repr(C)]
    struct Later<T>(T, [u64; 8]);
    let known = size_of::<kvx_offer_options>() as u32;
    let mut options = Later(sized::<kvx_offer_options>(), [0; 8]);
    let mut open = |options: &Later<kvx_offer_options>| {
        c! {
            let status = kvx_offer_open(
                pair.prefill,
                c"s".as_ptr().cast(),
                1,
                pair.source,
                &options.0,
                &mut made,
            );
            if status == KVX_OK {
                ok(kvx_handle_free(made));
            }
            status
        }
    };
    ok(open(&options));
    for size in [0, 1, 4, known - 8, known - 1, known + 5000, u32::MAX] {
        options.0.struct_size = size;
        refused(
            open(&options),
            KVX_ERR_INVALID_ARGUMENT,
            &format!("kvx_offer_options of {size} bytes"),
        );
        assert!(last_error().contains(&format!("{known} bytes")));
    }
    options.0.struct_size = known + 16;
    ok(open(&options));
    options.1[1] = 1;
    refused(open(&options), KVX_ERR_INVALID_ARGUMENT, "does not know");

    // Structs that are written, and elements of arrays.
    let mut result: kvx_result = sized();
    result.struct_size = 3;
    refused(
        c! { kvx_handle_poll(offer, &mut result) },
        KVX_ERR_INVALID_ARGUMENT,
        "kvx_result of 3 bytes",
    );
    let mut later = Later(sized::<kvx_result>(), [u64::MAX; 8]);
    later.0.struct_size += 64;
    assert_eq!(c! { kvx_handle_poll(offer, &mut later.0) }, KVX_PENDING);
    assert_eq!(
        (later.0.status, later.1, later.0.struct_size),
        (KVX_PENDING, [0; 8], size_of::<kvx_result>() as u32 + 64)
    );
    let mut event: kvx_event = sized();
    for size in [0, 8, size_of::<kvx_event>() - 1, usize::MAX] {
        let drained = c! { kvx_events_drain(pair.prefill, &mut event, size, 1, &mut 0) };
        refused(drained, KVX_ERR_INVALID_ARGUMENT, "kvx_event");
    }
    let overflow = c! { kvx_events_drain(pair.prefill, &mut event, size_of::<kvx_event>(), usize::MAX, &mut 0) };
    refused(overflow, KVX_ERR_INVALID_ARGUMENT, "address space");
    ok(kvx_handle_free(offer));
}

#[test]
fn values_and_lengths_that_cannot_be() {
    let pair = pair();
    let (offer, claim) = (pair.offer("values"), pair.claim("values"));
    let one = [1u32];
    let (mut made, mut options) = (0, sized::<kvx_offer_options>());
    let mut open = |change: &dyn Fn(&mut kvx_offer_options), says: &str| {
        options = sized();
        change(&mut options);
        let status = c! { kvx_offer_open(pair.prefill, c"v".as_ptr().cast(), 1, pair.source, &options, &mut made) };
        refused(status, KVX_ERR_INVALID_ARGUMENT, says);
    };
    open(&|options| options.readers = 1 << 16, "readers = 65536");
    open(&|options| options.priority = 256, "priority = 256");
    open(&|options| options.checksum = 2, "checksum = 2");
    open(&|options| options.events = 7, "events = 7");

    let mut selection = blocks(0, &one);
    for count in [usize::MAX, usize::MAX / 4, isize::MAX as usize / 2] {
        selection.block_count = count;
        let appended = c! { kvx_offer_append(offer, &selection, 1) };
        refused(appended, KVX_ERR_INVALID_ARGUMENT, "address space");
        refused(
            c! { kvx_claim_fill(claim, &selection, 1) },
            KVX_ERR_INVALID_ARGUMENT,
            "address space",
        );
        let retracted = c! { kvx_offer_retract(offer, one.as_ptr(), count) };
        refused(retracted, KVX_ERR_INVALID_ARGUMENT, "address space");
    }
    selection = blocks(0, &one);
    c! {
        refused(
            kvx_offer_append(offer, &selection, usize::MAX),
            KVX_ERR_INVALID_ARGUMENT,
            "address space",
        );
        refused(kvx_offer_append(offer, null(), 1), KVX_ERR_INVALID_ARGUMENT, "null");
        refused(
            kvx_offer_append(offer, null(), 0),
            KVX_ERR_INVALID_ARGUMENT,
            "cache groups",
        );
        selection.blocks = null();
        refused(
            kvx_offer_append(offer, &selection, 1),
            KVX_ERR_INVALID_ARGUMENT,
            "blocks: the pointer is null",
        );
        let beyond = [BLOCKS];
        refused(
            kvx_offer_append(offer, &blocks(0, &beyond), 1),
            KVX_ERR_OUT_OF_BOUNDS,
            "block 64",
        );
        let part: kvx_part = sized();
        refused(
            kvx_ready_many(pair.prefill, &part, usize::MAX),
            KVX_ERR_INVALID_ARGUMENT,
            "address space",
        );
        refused(
            kvx_ready_many(pair.prefill, &part, 1),
            KVX_ERR_INVALID_ARGUMENT,
            "part 0",
        );
        let mut what = target(&selection);
        what.descriptor_count = usize::MAX;
        (what.group_count, what.descriptors) = (0, 16 as *const kvx_descriptor);
        refused(
            kvx_pool_grant(pair.destination, &what, null(), &mut made),
            KVX_ERR_INVALID_ARGUMENT,
            "address space",
        );
        let sources = kvx_claim_open(
            pair.decode,
            c"v".as_ptr().cast(),
            1,
            pair.destination,
            &pair.address,
            usize::MAX,
            null(),
            &mut made,
        );
        refused(sources, KVX_ERR_INVALID_ARGUMENT, "address space");
        let stale = [pair.address, 12];
        let stale = kvx_claim_open(
            pair.decode,
            c"v".as_ptr().cast(),
            1,
            pair.destination,
            stale.as_ptr(),
            2,
            null(),
            &mut made,
        );
        refused(stale, KVX_ERR_INVALID_ARGUMENT, "as an address handle");
    }
    refused(kvx_offer_finish(offer, 1), KVX_ERR_OUT_OF_BOUNDS, "");
    for handle in [offer, claim] {
        ok(kvx_handle_free(handle));
    }
}

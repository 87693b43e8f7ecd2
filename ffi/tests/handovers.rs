//! Offers, claims, grants, transfers and events: every function, used as it is meant to be.

#[macro_use]
mod support;

use std::ffi::CStr;
use std::mem::size_of;
use std::ptr::null;
use std::sync::Arc;

use kvxfer_ffi::*;
use support::*;

#[test]
fn a_request_from_offer_to_arrival() {
    let pair = pair();
    let (from, to) = ([3, 1, 7, 5], [60, 2, 40, 11]);
    pair.compute(&from, 0x5a);
    let claim = pair.claim("request");
    let offer = pair.offer("request");
    ok(c! { kvx_claim_fill(claim, &blocks(0, &to), 1) });
    event(pair.decode, KVX_EVENT_MATCHED, 20);
    for handle in [claim, offer] {
        assert_eq!(c! { kvx_handle_poll(handle, std::ptr::null_mut()) }, KVX_PENDING);
        let mut result = sized();
        assert_eq!(c! { kvx_handle_wait(handle, 0, &mut result) }, KVX_PENDING);
        assert_eq!(
            (result.status, result.destination),
            (KVX_PENDING, KVX_DESTINATION_QUARANTINED)
        );
        let mut waited = 0;
        assert!(!text(|to, size| c! { kvx_handle_waiting_on(handle, to, size, &mut waited) }).is_empty());
        assert_eq!(text(|to, size| c! { kvx_handle_error(handle, to, size) }), "");
    }
    c! {
        ok(kvx_offer_append(offer, &blocks(0, &from[..1]), 1));
        ok(kvx_offer_ready(offer, 0, 1, 0, 0));
        ok(kvx_offer_append(offer, &blocks(1, &from[1..]), 1));
        let mut part: kvx_part = sized();
        (part.offer, part.first_token, part.token_end, part.layer_end) = (offer, 1, 3, 1);
        ok(kvx_ready_many(pair.prefill, &part, 1));
        refused(
            kvx_ready_many(pair.decode, &part, 1),
            KVX_ERR_INVALID_ARGUMENT,
            "part 0",
        );
        refused(kvx_ready_many(pair.prefill, &part, 1), KVX_ERR_INVALID_ARGUMENT, "");
        ok(kvx_ready_many(pair.prefill, null(), 0));
    }
    refused(
        kvx_offer_ready(offer, 3, 4, 1 << 20, 0),
        KVX_ERR_INVALID_ARGUMENT,
        "first_layer",
    );
    ok(kvx_offer_finish(offer, 4));

    let arrived = end(claim);
    assert_eq!((arrived.status, arrived.bytes), (KVX_OK, 4 * u64::from(BLOCK_BYTES)));
    pair.verify(&from, &to, 0x5a);
    let released = end(offer);
    assert_eq!((released.status, released.members), (KVX_OK, 1));
    let (mut member, mut count, mut claimant) = (sized::<kvx_member>(), 0, kvx_id128::default());
    c! {
        ok(kvx_handle_members(
            offer,
            &mut member,
            size_of::<kvx_member>(),
            1,
            &mut count,
        ));
        ok(kvx_endpoint_incarnation(pair.decode, &mut claimant));
    }
    assert_eq!((count, member.status, member.peer), (1, KVX_OK, claimant));
    assert_eq!(text(|to, size| c! { kvx_handle_member_error(offer, 0, to, size) }), "");
    let beyond = c! { kvx_handle_member_error(offer, 1, std::ptr::null_mut(), 0) };
    refused(beyond, KVX_ERR_OUT_OF_BOUNDS, "member 1");
    let (mut id, ended) = (0, event(pair.decode, KVX_EVENT_ENDED, 20));
    ok(c! { kvx_handle_id(claim, &mut id) });
    assert_eq!((ended.id, ended.error), (id, KVX_OK));
    let waits = c! { kvx_handle_waiting_on(claim, std::ptr::null_mut(), 0, std::ptr::null_mut()) };
    assert_eq!(waits, 0);
    ok(kvx_handle_free(claim));
    ok(kvx_handle_free(offer));
}

#[test]
fn requests_that_end_badly() {
    let pair = pair();
    // Declined.
    let (offer, claim) = (pair.offer("declined"), pair.claim("declined"));
    ok(kvx_claim_decline(claim));
    assert_eq!(end(claim).status, KVX_ERR_DECLINED);
    refused(end(claim).status, KVX_ERR_DECLINED, "Declined");
    assert_eq!(end(offer).status, KVX_ERR_DECLINED);
    assert_eq!(event(pair.decode, KVX_EVENT_ENDED, 20).error, KVX_ERR_DECLINED);
    for handle in [offer, claim] {
        ok(kvx_handle_free(handle));
    }
    // Declined by one of two readers: the other has its bytes, and the offer a verdict of each.
    let mut options: kvx_offer_options = sized();
    options.readers = 2;
    let (from, to, mut offer) = ([1], [2], 0);
    ok(c! {
        kvx_offer_open(
            pair.prefill,
            c"both".as_ptr().cast(),
            4,
            pair.source,
            &options,
            &mut offer,
        )
    });
    let claims = [pair.claim("both"), pair.claim("both")];
    ok(kvx_claim_decline(claims[0]));
    assert_eq!(end(claims[0]).status, KVX_ERR_DECLINED);
    c! {
        ok(kvx_claim_fill(claims[1], &blocks(0, &to), 1));
        ok(kvx_offer_append(offer, &blocks(0, &from), 1));
    }
    ok(kvx_offer_finish(offer, 1));
    assert_eq!(end(claims[1]).status, KVX_OK);
    assert_eq!((end(offer).status, end(offer).members), (KVX_OK, 2));
    let (mut members, mut count) = ([sized::<kvx_member>(); 2], 0);
    ok(c! { kvx_handle_members(offer, members.as_mut_ptr(), size_of::<kvx_member>(), 2, &mut count) });
    let (declined, arrived) = match members[0].status {
        KVX_ERR_DECLINED => (0, 1),
        _ => (1, 0),
    };
    assert_eq!(
        (members[declined].status, members[arrived].status, count),
        (KVX_ERR_DECLINED, KVX_OK, 2)
    );
    let said = text(|to, size| c! { kvx_handle_member_error(offer, declined as u32, to, size) });
    assert!(said.starts_with("Declined"), "{said}");
    for handle in [offer, claims[0], claims[1]] {
        ok(kvx_handle_free(handle));
    }
    // Retracted.
    let (offer, claim) = (pair.offer("retracted"), pair.claim("retracted"));
    let from = [1, 2];
    c! {
        ok(kvx_offer_append(offer, &blocks(0, &from), 1));
        refused(kvx_offer_retract(offer, [9].as_ptr(), 1), KVX_ERR_INVALID_ARGUMENT, "");
        ok(kvx_offer_retract(offer, from.as_ptr(), 2));
    }
    assert_eq!(end(offer).status, KVX_ERR_RETRACTED);
    assert_eq!(end(claim).status, KVX_ERR_RETRACTED);
    assert!(text(|to, size| c! { kvx_handle_error(claim, to, size) }).starts_with("Retracted"));
    for handle in [offer, claim] {
        ok(kvx_handle_free(handle));
    }
    // Restarted: the first attempt's bytes do not count.
    let (offer, claim) = (pair.offer("restarted"), pair.claim("restarted"));
    let (from, to) = ([11, 12], [21, 22]);
    c! {
        ok(kvx_claim_fill(claim, &blocks(0, &to), 1));
        ok(kvx_offer_append(offer, &blocks(0, &from[..1]), 1));
        ok(kvx_offer_ready(offer, 0, 1, 0, 0));
    }
    ok(kvx_offer_restart(offer));
    while kvx_offer_voided(offer) == KVX_PENDING {}
    ok(kvx_offer_voided(offer));
    pair.compute(&from, 0x33);
    ok(c! { kvx_offer_append(offer, &blocks(0, &from), 1) });
    ok(kvx_offer_finish(offer, 2));
    assert_eq!(end(claim).status, KVX_OK);
    pair.verify(&from, &to, 0x33);
    for handle in [offer, claim] {
        ok(kvx_handle_free(handle));
    }
    // A deadline.
    let mut options: kvx_offer_options = sized();
    (options.deadline_ms, options.readers, options.priority, options.checksum) = (20, 2, 255, 1);
    let mut offer = 0;
    ok(c! {
        kvx_offer_open(
            pair.prefill,
            c"late".as_ptr().cast(),
            4,
            pair.source,
            &options,
            &mut offer,
        )
    });
    let ended = end(offer);
    assert_eq!((ended.status, ended.retryable), (KVX_ERR_UNCLAIMED, 1));
    ok(kvx_handle_free(offer));
    // A handle that is let go: the request goes on without it.
    let (offer, claim) = (pair.offer("detached"), pair.claim("detached"));
    ok(c! { kvx_claim_fill(claim, &blocks(0, &to), 1) });
    ok(c! { kvx_offer_append(offer, &blocks(0, &from), 1) });
    ok(kvx_offer_finish(offer, 2));
    ok(kvx_handle_detach(offer));
    refused(kvx_handle_cancel(offer), KVX_ERR_INVALID_ARGUMENT, "freed");
    assert_eq!(end(claim).status, KVX_OK);
    ok(kvx_handle_free(claim));
}

#[test]
fn grants_pushes_and_pulls() {
    let pair = pair();
    let (from, to) = ([3, 4, 5], [30, 31, 32]);
    pair.compute(&from, 1);
    let (sent, received) = (blocks(0, &from), blocks(0, &to));
    let (mut owned, mut grant, mut transfer) = (0, 0, 0);
    let mut options: kvx_grant_options = sized();
    (options.deadline_ms, options.events, options.event_data) = (LONG_MS, 1, 77);
    ok(c! { kvx_endpoint_incarnation(pair.prefill, &mut options.holder) });
    c! {
        ok(kvx_pool_grant(
            pair.destination,
            &target(&received),
            &options,
            &mut owned,
        ));
        ok(kvx_grant_handle_grant(owned, &mut grant));
    }
    let mut bytes = vec![0u8; 4096];
    let length = c! { kvx_grant_bytes(grant, bytes.as_mut_ptr().cast(), bytes.len()) };
    assert!(length > 0);
    assert_eq!(c! { kvx_grant_bytes(grant, bytes.as_mut_ptr().cast(), 1) }, length);
    ok(kvx_grant_free(grant));
    ok(c! { kvx_grant_parse(bytes.as_ptr().cast(), length as usize, &mut grant) });
    let mut info: kvx_grant_info = sized();
    ok(c! { kvx_grant_describe(grant, &mut info) });
    assert_eq!((info.access, info.pool), (KVX_ACCESS_WRITE, 0));
    let cut = c! { kvx_grant_parse(bytes.as_ptr().cast(), length as usize - 1, &mut 0) };
    refused(cut, KVX_ERR_INVALID_ARGUMENT, "grant");

    let mut options: kvx_transfer_options = sized();
    (options.message, options.message_length) = (c"with love".as_ptr().cast(), 9);
    (options.checksum, options.events, options.event_data) = (1, 1, 88);
    c! {
        ok(kvx_push(
            pair.prefill,
            pair.source,
            &target(&sent),
            grant,
            &options,
            &mut transfer,
        ));
        assert_eq!(end(transfer).bytes, 3 * u64::from(BLOCK_BYTES));
        let arrived = end(owned);
        assert_eq!((arrived.status, arrived.message_length), (KVX_OK, 9));
        let mut message = [0u8; 16];
        assert_eq!(kvx_handle_message(owned, message.as_mut_ptr().cast(), 3), 9);
        assert_eq!(message, [0; 16]);
        assert_eq!(kvx_handle_message(owned, message.as_mut_ptr().cast(), 16), 9);
        assert_eq!(&message[..9], b"with love");
        assert_eq!(kvx_handle_message(transfer, message.as_mut_ptr().cast(), 16), 0);
    }
    pair.verify(&from, &to, 1);
    event(pair.decode, KVX_EVENT_ENDED, 77);
    event(pair.prefill, KVX_EVENT_ENDED, 88);
    let mut path: kvx_path_info = sized();
    ok(c! { kvx_transfer_path_info(transfer, &mut path) });
    assert!(path.rails > 0 && path.rails <= path.rails_configured);
    assert_eq!(c! { CStr::from_ptr(path.transport.as_ptr()) }, c"tcp");
    assert!(text(|to, size| c! { kvx_transfer_path(transfer, to, size) }).starts_with("tcp, "));
    // Used once.
    let mut again = 0;
    let twice = c! { kvx_push(pair.prefill, pair.source, &target(&sent), grant, null(), &mut again) };
    if twice == KVX_OK {
        assert_ne!(end(again).status, KVX_OK);
        ok(kvx_handle_free(again));
    }
    ok(kvx_grant_free(grant));
    for handle in [transfer, owned] {
        ok(kvx_handle_free(handle));
    }

    // The other way, by descriptors; and a grant is for one direction only.
    let piece = |block| kvx_descriptor {
        plane: 0,
        block,
        offset: 512,
        length: 1024,
    };
    let mut read: kvx_target = sized();
    let (there, here) = (piece(4), piece(50));
    (read.descriptors, read.descriptor_count) = (&there, 1);
    c! {
        ok(kvx_pool_serve(pair.source, &read, null(), &mut owned));
        ok(kvx_grant_handle_grant(owned, &mut grant));
        ok(kvx_grant_describe(grant, &mut info));
        assert_eq!(info.access, KVX_ACCESS_READ);
        read.descriptors = &here;
        let wrong = kvx_push(pair.decode, pair.destination, &read, grant, null(), &mut transfer);
        refused(wrong, KVX_ERR_INVALID_ARGUMENT, "pull from it");
        let message = kvx_pull(pair.decode, grant, pair.destination, &read, &options, &mut transfer);
        refused(message, KVX_ERR_INVALID_ARGUMENT, "message");
        ok(kvx_pull(
            pair.decode,
            grant,
            pair.destination,
            &read,
            null(),
            &mut transfer,
        ));
        assert_eq!(end(transfer).bytes, 1024);
        assert_eq!(end(owned).status, KVX_OK);
        let mut byte = 0u8;
        ok(kvx_pool_copy_out(
            pair.destination,
            0,
            50,
            512,
            (&raw mut byte).cast(),
            1,
        ));
        assert_eq!(byte, 4 ^ 1);
        (read.groups, read.group_count) = (&sent, 1);
        let both = kvx_pool_serve(pair.source, &read, null(), &mut 0);
        refused(both, KVX_ERR_INVALID_ARGUMENT, "descriptors and groups");
    }
    ok(kvx_grant_free(grant));
    for handle in [transfer, owned] {
        ok(kvx_handle_free(handle));
    }
}

#[test]
fn scopes_say_which_layers_and_heads() {
    let (prefill, decode) = (endpoint(c"prefill-0"), endpoint(c"decode-0"));
    let mut spec: kvx_preset_spec = sized();
    spec.models_toml = c"[[model]]\nname = \"mine\"\ndtype = \"f16\"\n[[model.group]]\nname = \"attention\"\n\
        kind = \"attention\"\nlayers = [{ first = 0, end = 4 }]\nkv_heads = 4\nhead_size = 8\n"
        .as_ptr();
    (spec.model, spec.tokens_per_block, spec.blocks) = (c"mine".as_ptr(), 16, 4);
    let (mut layout, mut source, mut destination) = (0, 0, 0);
    c! {
        ok(kvx_layout_preset(&spec, &mut layout));
        ok(kvx_pool_allocate(prefill, layout, KVX_ROLE_SERVE, &mut source));
        ok(kvx_pool_allocate(decode, layout, KVX_ROLE_RECEIVE, &mut destination));
    }
    let block = [2u32];
    let mut selection = blocks(0, &block);
    selection.token_end = 16;
    let (layers, heads) = ([1u16, 3], [kvx_head_range { first: 2, end: 4 }]);
    let mut target = target(&selection);
    (target.layers, target.layer_count) = (layers.as_ptr(), 2);
    (target.heads, target.head_count) = (heads.as_ptr(), 1);
    let (mut owned, mut grant, mut transfer) = (0, 0, 0);
    c! {
        ok(kvx_pool_grant(destination, &target, null(), &mut owned));
        ok(kvx_grant_handle_grant(owned, &mut grant));
        ok(kvx_push(prefill, source, &target, grant, null(), &mut transfer));
    }
    // Layers, K and V, tokens, heads, elements, bytes.
    assert_eq!(end(transfer).bytes, 2 * 2 * 16 * 2 * 8 * 2);
    assert_eq!(end(owned).status, KVX_OK);
    for handle in [transfer, owned] {
        ok(kvx_handle_free(handle));
    }
    ok(kvx_grant_free(grant));
    ok(kvx_layout_free(layout));
    for (endpoint, pool) in [(prefill, source), (decode, destination)] {
        ok(kvx_pool_free(pool));
        ok(kvx_endpoint_destroy(endpoint, LONG_MS));
    }
}

#[test]
fn events_come_in_batches_with_a_descriptor() {
    let pair = pair();
    let mut fd = -1;
    ok(c! { kvx_events_fd(pair.prefill, &mut fd) });
    let readable = || {
        let mut polled = libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one local struct, as the count says.
        unsafe { libc::poll(&mut polled, 1, 0) == 1 }
    };
    assert_eq!(kvx_events_wait(pair.prefill, 1), KVX_PENDING);
    assert!(!readable());
    let offers: Vec<_> = (0..5).map(|number| pair.offer(&format!("offer {number}"))).collect();
    for &offer in &offers {
        ok(kvx_handle_cancel(offer));
        end(offer);
    }
    ok(kvx_events_wait(pair.prefill, LONG_MS));
    assert!(readable());
    // A caller of a later version has larger elements: what it knows beyond this one is zero.
    let size = size_of::<kvx_event>() + 16;
    let (mut buffer, mut count, mut seen) = (vec![0xffu8; size * 3], 0, 0);
    while seen < 5 {
        ok(kvx_events_wait(pair.prefill, LONG_MS));
        ok(c! { kvx_events_drain(pair.prefill, buffer.as_mut_ptr().cast(), size, 3, &mut count) });
        assert!(count <= 3);
        for element in buffer.chunks(size).take(count) {
            let event = c! { element.as_ptr().cast::<kvx_event>().read_unaligned() };
            assert_eq!((event.struct_size as usize, event.kind), (size, KVX_EVENT_ENDED));
            assert_eq!((event.error, event.data), (KVX_ERR_CANCELLED, 10));
            assert_eq!(element[size_of::<kvx_event>()..], [0; 16]);
            seen += 1;
        }
    }
    assert!(!readable());
    ok(c! { kvx_events_drain(pair.prefill, std::ptr::null_mut(), size, 0, &mut count) });
    assert_eq!(count, 0);
    for offer in offers {
        ok(kvx_handle_free(offer));
    }
}

#[test]
fn drained_and_closed_endpoints_say_so() {
    let pair = pair();
    let offer = pair.offer("open");
    refused(
        kvx_endpoint_drain(pair.prefill, 5),
        KVX_ERR_DEADLINE_EXCEEDED,
        "1 handles",
    );
    ok(kvx_handle_cancel(offer));
    ok(kvx_endpoint_drain(pair.prefill, LONG_MS));
    ok(kvx_endpoint_close(pair.prefill, LONG_MS));
    ok(kvx_endpoint_close(pair.prefill, LONG_MS));
    let mut refused_offer = 7;
    let closed = c! {
        kvx_offer_open(
            pair.prefill,
            c"k".as_ptr().cast(),
            1,
            pair.source,
            null(),
            &mut refused_offer,
        )
    };
    refused(closed, KVX_ERR_CLOSED, "");
    assert_eq!(refused_offer, 0);
    ok(kvx_handle_free(offer));
}

/// A thread that waits keeps what it waits for, whoever frees the handle meanwhile.
#[test]
fn a_handle_may_be_freed_under_a_call() {
    let pair = Arc::new(pair());
    let offer = pair.offer("waited for");
    let waiting = std::thread::spawn(move || c! { kvx_handle_wait(offer, LONG_MS, std::ptr::null_mut()) });
    std::thread::sleep(std::time::Duration::from_millis(20));
    ok(kvx_handle_cancel(offer));
    ok(kvx_handle_free(offer));
    let status = waiting.join().unwrap();
    // It waited for the end, or it came too late.
    assert!(
        matches!(status, KVX_ERR_CANCELLED | KVX_ERR_INVALID_ARGUMENT),
        "{status}"
    );
}

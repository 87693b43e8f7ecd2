//! Errors, settings, addresses, peers, layouts and pools: every function, used as it is meant to be.

#[macro_use]
mod support;

use std::ffi::{CStr, c_void};
use std::mem::size_of;
use std::ptr::null;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvxfer_ffi::*;
use support::*;

#[test]
fn versions() {
    assert_eq!(kvx_abi_version(), 2);
    let version = c! { CStr::from_ptr(kvx_version_string()) };
    assert_eq!(version.to_str().unwrap(), env!("CARGO_PKG_VERSION"));
}

#[test]
fn errors_are_kept_per_thread() {
    let mut numbers: kvx_error = sized();
    kvx_clear_last_error();
    ok(c! { kvx_last_error(&mut numbers) });
    assert_eq!((numbers.status, last_error().as_str()), (KVX_OK, ""));
    refused(
        kvx_config_free(7),
        KVX_ERR_INVALID_ARGUMENT,
        "no handle looks like that",
    );
    ok(c! { kvx_last_error(&mut numbers) });
    assert_eq!((numbers.status, numbers.retryable), (KVX_ERR_INVALID_ARGUMENT, 0));
    std::thread::spawn(|| assert_eq!(last_error(), "")).join().unwrap();
    // As snprintf: the whole length, and as much as fits.
    let mut short = [b'x'; 5];
    let length = c! { kvx_last_error_message(short.as_mut_ptr().cast(), short.len()) };
    assert_eq!(length as usize, last_error().len());
    assert_eq!(&short, b"Inva\0");
}

#[test]
fn configs() {
    let mut config = 0;
    c! {
        ok(kvx_config_create(&mut config));
        ok(kvx_config_set(config, c"listen".as_ptr(), c"127.0.0.1:0".as_ptr()));
        ok(kvx_config_set(config, c"transports".as_ptr(), c"tcp".as_ptr()));
        ok(kvx_config_set(
            config,
            c"deadlines.liveness_ms".as_ptr(),
            c"600".as_ptr(),
        ));
    }
    refused(kvx_config_check(config), KVX_ERR_INVALID_ARGUMENT, "heartbeat");
    ok(c! { kvx_config_set(config, c"deadlines.heartbeat_ms".as_ptr(), c"100".as_ptr()) });
    ok(kvx_config_check(config));
    let unknown = c! { kvx_config_set(config, c"deadlines.livenes_ms".as_ptr(), c"1".as_ptr()) };
    refused(unknown, KVX_ERR_INVALID_ARGUMENT, "deadlines.liveness_ms");
    ok(kvx_config_set_rank(config, 1, 4, 0, 2));
    refused(
        kvx_config_set_rank(config, 4, 4, 0, 1),
        KVX_ERR_INVALID_ARGUMENT,
        "tensor rank 4 of 4",
    );
    let mut endpoint = 0;
    ok(c! { kvx_endpoint_create(config, &mut endpoint) });
    ok(kvx_config_free(config));
    let (own, mut info) = (address(endpoint), sized::<kvx_address_info>());
    ok(c! { kvx_address_describe(own, &mut info) });
    assert_eq!((info.tensor_rank, info.tensor_size, info.pipeline_size), (1, 4, 2));
    ok(kvx_address_free(own));
    ok(kvx_endpoint_destroy(endpoint, LONG_MS));

    let path = std::env::temp_dir().join(format!("kvxfer-ffi-{}.toml", std::process::id()));
    std::fs::write(&path, "name = \"from-a-file\"\ntransports = [\"tcp\"]\n").unwrap();
    let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    ok(c! { kvx_config_load(name.as_ptr(), &mut config) });
    std::fs::remove_file(&path).unwrap();
    ok(c! { kvx_endpoint_create(config, &mut endpoint) });
    assert_eq!(
        text(|to, size| c! { kvx_endpoint_name(endpoint, to, size) }),
        "from-a-file"
    );
    ok(kvx_endpoint_destroy(endpoint, LONG_MS));
    ok(kvx_config_free(config));
    let gone = c! { kvx_config_load(name.as_ptr(), &mut config) };
    refused(gone, KVX_ERR_INVALID_ARGUMENT, "cannot be read");
    assert_eq!(config, 0);
    assert!(text(|to, size| c! { kvx_config_reference(to, size) }).contains("KVXFER_LIMITS_SLOTS_MAX"));
}

#[test]
fn addresses() {
    let endpoint = endpoint(c"addressed");
    let own = address(endpoint);
    let published = text(|to, size| c! { kvx_address_text(own, to, size) });
    let mut bytes = [0u8; 80];
    let length = c! { kvx_address_bytes(own, bytes.as_mut_ptr().cast(), bytes.len()) };
    let (mut parsed, mut unpacked) = (0, 0);
    let c_text = std::ffi::CString::new(published.clone()).unwrap();
    c! {
        ok(kvx_address_parse(c_text.as_ptr(), &mut parsed));
        ok(kvx_address_from_bytes(
            bytes.as_ptr().cast(),
            length as usize,
            &mut unpacked,
        ));
    }
    for address in [parsed, unpacked] {
        assert_eq!(text(|to, size| c! { kvx_address_text(address, to, size) }), published);
        let (mut info, mut incarnation) = (sized::<kvx_address_info>(), kvx_id128::default());
        ok(c! { kvx_address_describe(address, &mut info) });
        ok(c! { kvx_endpoint_incarnation(endpoint, &mut incarnation) });
        assert_eq!((info.incarnation, info.sockets), (incarnation, 1));
        ok(kvx_address_free(address));
    }
    let garbage = c! { kvx_address_parse(c"nowhere".as_ptr(), &mut parsed) };
    refused(garbage, KVX_ERR_INVALID_ARGUMENT, "nowhere");
    ok(kvx_address_free(own));
    ok(kvx_endpoint_destroy(endpoint, LONG_MS));
}

#[test]
fn peers_are_connected_explained_and_counted() {
    let pair = pair();
    ok(kvx_endpoint_connect(pair.decode, pair.address, LONG_MS));
    let (mut peers, mut count) = ([sized::<kvx_peer>(); 2], 0);
    ok(c! { kvx_endpoint_peers(pair.decode, peers.as_mut_ptr(), size_of::<kvx_peer>(), 2, &mut count) });
    assert_eq!((count, peers[0].state), (1, KVX_PEER_READY));
    let field = |text: &[std::ffi::c_char]| c! { CStr::from_ptr(text.as_ptr()) }.to_str().unwrap().to_owned();
    assert_eq!(
        (field(&peers[0].name), field(&peers[0].transport)),
        ("prefill-0".into(), "tcp".into())
    );
    assert!(text(|to, size| c! { kvx_endpoint_explain(pair.decode, pair.address, to, size) }).contains("path: tcp"));
    assert!(text(|to, size| c! { kvx_endpoint_metrics(pair.decode, to, size) }).contains("kvxfer_"));
    // Nobody listens there.
    let (mut nobody, began) = (0, std::time::Instant::now());
    ok(c! { kvx_address_parse(c"127.0.0.1:1".as_ptr(), &mut nobody) });
    refused(
        kvx_endpoint_connect(pair.decode, nobody, 50),
        KVX_ERR_UNREACHABLE,
        "127.0.0.1:1",
    );
    assert!(began.elapsed().as_secs() < 20);
    ok(kvx_address_free(nobody));
}

#[test]
fn layouts() {
    let mut layout = 0;
    let mut groups = [sized::<kvx_group_spec>(), sized::<kvx_group_spec>()];
    groups[0].kind = KVX_GROUP_ATTENTION;
    groups[0].name = c"attention".as_ptr();
    (groups[0].blocks, groups[0].dtype, groups[0].tokens_per_block) = (8, KVX_DTYPE_BF16, 16);
    (groups[0].kv_heads, groups[0].head_size, groups[0].window) = (8, 64, 1024);
    (groups[0].sharding, groups[0].rank, groups[0].size) = (KVX_SHARDING_HEADS, 1, 4);
    (groups[1].kind, groups[1].name, groups[1].blocks) = (KVX_GROUP_STATE, c"states".as_ptr(), 4);
    let mut planes = [
        sized::<kvx_plane_spec>(),
        sized::<kvx_plane_spec>(),
        sized::<kvx_plane_spec>(),
    ];
    (planes[0].kind, planes[0].layer) = (KVX_PLANE_KEY, c"a".as_ptr());
    (planes[1].kind, planes[1].layer) = (KVX_PLANE_VALUE, c"a".as_ptr());
    (planes[1].order_count, planes[1].order) = (3, [KVX_AXIS_HEAD, KVX_AXIS_TOKEN, KVX_AXIS_DIM, 0]);
    (planes[2].kind, planes[2].layer, planes[2].group) = (KVX_PLANE_STATE, c"b".as_ptr(), 1);
    (planes[2].region, planes[2].block_length, planes[2].stride) = (1, 100, 128);
    let mut spec: kvx_layout_spec = sized();
    (spec.groups, spec.group_count) = (groups.as_ptr(), 2);
    (spec.planes, spec.plane_count) = (planes.as_ptr(), 3);
    let lengths = [0u64, 4096];
    (spec.region_lengths, spec.region_count) = (lengths.as_ptr(), 2);
    ok(c! { kvx_layout_create(&spec, &mut layout) });

    let mut info: kvx_layout_info = sized();
    ok(c! { kvx_layout_describe(layout, &mut info) });
    assert_eq!((info.groups, info.planes, info.layers, info.regions), (2, 3, 2, 2));
    assert_ne!(info.geometry_hash, 0);
    let (mut index, mut length, mut plane) = (9, 0, sized::<kvx_plane_info>());
    c! {
        ok(kvx_layout_layer_index(layout, c"b".as_ptr(), &mut index));
        ok(kvx_layout_region_length(layout, 0, &mut length));
        ok(kvx_layout_plane(layout, 2, &mut plane));
    }
    let block = 16 * 2 * 64 * 2; // tokens, heads of this rank, elements, bytes
    assert_eq!((index, length), (1, 2 * 8 * block));
    assert_eq!(
        (plane.kind, plane.layer, plane.stride, plane.block_length),
        (KVX_PLANE_STATE, 1, 128, 100)
    );
    ok(c! { kvx_layout_region_length(layout, 1, &mut length) });
    assert_eq!(length, 4096);
    assert_eq!(text(|to, size| c! { kvx_layout_layer_name(layout, 0, to, size) }), "a");
    let (buffer, none) = (std::ptr::null_mut(), 0);
    refused(
        c! { kvx_layout_layer_name(layout, 2, buffer, none) },
        KVX_ERR_OUT_OF_BOUNDS,
        "layer 2",
    );
    refused(
        c! { kvx_layout_layer_index(layout, c"c".as_ptr(), &mut index) },
        KVX_ERR_OUT_OF_BOUNDS,
        "\"c\"",
    );
    refused(
        c! { kvx_layout_region_length(layout, 2, &mut length) },
        KVX_ERR_OUT_OF_BOUNDS,
        "region 2",
    );
    refused(
        c! { kvx_layout_plane(layout, 3, &mut plane) },
        KVX_ERR_OUT_OF_BOUNDS,
        "plane 3",
    );
    ok(kvx_layout_free(layout));

    // What is wrong is named.
    let mut create = |change: &dyn Fn(&mut [kvx_group_spec; 2], &mut [kvx_plane_spec; 3]), says: &str| {
        let (mut changed_groups, mut changed_planes) = (groups, planes);
        change(&mut changed_groups, &mut changed_planes);
        let mut changed = spec;
        (changed.groups, changed.planes) = (changed_groups.as_ptr(), changed_planes.as_ptr());
        refused(
            c! { kvx_layout_create(&changed, &mut layout) },
            KVX_ERR_INVALID_ARGUMENT,
            says,
        );
        assert_eq!(layout, 0);
    };
    create(&|groups, _| groups[1].kind = 77, "group 1");
    create(&|groups, _| groups[0].dtype = 0, "dtype = 0");
    create(&|groups, _| groups[0].sharding = 9, "sharding = 9");
    create(&|groups, _| groups[0].tokens_per_block = 0, "tokens_per_block = 0");
    create(&|groups, _| groups[0].name = null(), "null");
    create(&|_, planes| planes[2].kind = 0, "plane 2");
    create(&|_, planes| planes[1].order_count = 5, "order_count = 5");
    create(&|_, planes| planes[1].order[0] = 8, "order = 8");
    create(&|_, planes| planes[1].order_count = 1, "one axis");
    create(&|_, planes| planes[1].group = 1 << 16, "group = 65536");

    // Packed, latent and shared ones.
    (planes[0].order_count, planes[0].order[0]) = (1, KVX_AXIS_PACKED);
    (spec.planes, spec.shared_blocks) = (planes.as_ptr(), 1);
    ok(c! { kvx_layout_create(&spec, &mut layout) });
    ok(c! { kvx_layout_describe(layout, &mut info) });
    assert_eq!(info.shared_blocks, 1);
    ok(kvx_layout_free(layout));
    (groups[0].kind, groups[0].kv_heads, groups[0].sharding) = (KVX_GROUP_LATENT, 0, KVX_SHARDING_NONE);
    (groups[0].rank, groups[0].size, groups[0].window, groups[0].head_size) = (0, 0, 0, 576);
    spec.groups = groups.as_ptr();
    let mut latent = sized::<kvx_plane_spec>();
    (latent.kind, latent.layer) = (KVX_PLANE_LATENT, c"a".as_ptr());
    (spec.planes, spec.plane_count, spec.group_count, spec.region_count) = (&latent, 1, 1, 0);
    ok(c! { kvx_layout_create(&spec, &mut layout) });
    ok(kvx_layout_free(layout));
}

#[test]
fn presets() {
    let mut spec: kvx_preset_spec = sized();
    spec.model = c"llama-3.1-70b".as_ptr();
    (spec.tensor_size, spec.tokens_per_block, spec.blocks) = (8, 16, 4);
    let (mut layout, mut info) = (0, sized::<kvx_layout_info>());
    for arrangement in [
        KVX_ARRANGEMENT_PER_LAYER,
        KVX_ARRANGEMENT_FUSED,
        KVX_ARRANGEMENT_BLOCK_MAJOR,
        KVX_ARRANGEMENT_PER_HEAD,
    ] {
        spec.arrangement = arrangement;
        ok(c! { kvx_layout_preset(&spec, &mut layout) });
        ok(c! { kvx_layout_describe(layout, &mut info) });
        assert_eq!(info.layers, 80);
        ok(kvx_layout_free(layout));
    }
    (spec.first_layer, spec.layer_end) = (40, 80);
    ok(c! { kvx_layout_preset(&spec, &mut layout) });
    ok(c! { kvx_layout_describe(layout, &mut info) });
    assert_eq!(info.layers, 40);
    assert_eq!(text(|to, size| c! { kvx_layout_layer_name(layout, 0, to, size) }), "40");
    ok(kvx_layout_free(layout));

    spec.model = c"gpt-9".as_ptr();
    refused(
        c! { kvx_layout_preset(&spec, &mut layout) },
        KVX_ERR_INVALID_ARGUMENT,
        "llama-3.1-70b",
    );
    spec.arrangement = 4;
    spec.model = c"llama-3.1-70b".as_ptr();
    refused(
        c! { kvx_layout_preset(&spec, &mut layout) },
        KVX_ERR_INVALID_ARGUMENT,
        "arrangement = 4",
    );

    let own =
        c"[[model]]\nname = \"mine\"\ndtype = \"f16\"\n[[model.group]]\nname = \"attention\"\nkind = \"attention\"\n\
        layers = [{ first = 0, end = 2 }]\nkv_heads = 4\nhead_size = 8\n";
    (spec.models_toml, spec.model, spec.arrangement) = (own.as_ptr(), c"mine".as_ptr(), KVX_ARRANGEMENT_FUSED);
    (spec.first_layer, spec.layer_end, spec.tensor_size) = (0, 0, 0);
    ok(c! { kvx_layout_preset(&spec, &mut layout) });
    ok(kvx_layout_free(layout));
    spec.model = c"yours".as_ptr();
    refused(
        c! { kvx_layout_preset(&spec, &mut layout) },
        KVX_ERR_INVALID_ARGUMENT,
        "mine",
    );
}

static RELEASED: AtomicUsize = AtomicUsize::new(0);

static CALLED_INSIDE: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn released(data: *mut c_void) {
    drop(c! { Box::from_raw(data.cast::<Vec<u8>>()) });
    // Calls from inside are turned away instead of waiting for a lock that is held.
    if kvx_config_free(1) == KVX_ERR_UNSUPPORTED {
        CALLED_INSIDE.fetch_add(1, Ordering::SeqCst);
    }
    RELEASED.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn memory_of_the_callers_is_given_back_once() {
    let (endpoint, layout) = (endpoint(c"registers"), opaque());
    let length = (BLOCK_BYTES * BLOCKS) as usize;
    let memory = Box::into_raw(Box::new(vec![7u8; length]));
    let mut spec: kvx_region_spec = sized();
    spec.address = c! { (*memory).as_mut_ptr().cast() };
    (spec.length, spec.release_data) = (length as u64, memory.cast());
    spec.release = Some(released);
    let mut pool = 0;
    let register = |spec: &kvx_region_spec, count, role, pool: &mut u64| {
        c! {
            kvx_pool_register(endpoint, layout, spec, count, role, pool)
        }
    };
    // What is refused is not kept, and not given back.
    for (change, status, says) in [
        (
            &(|spec: &mut kvx_region_spec| spec.length = 1) as &dyn Fn(&mut kvx_region_spec),
            KVX_ERR_OUT_OF_BOUNDS,
            "1 bytes",
        ),
        (&|spec| spec.length = u64::MAX, KVX_ERR_INVALID_ARGUMENT, "region"),
        (
            &|spec| spec.address = std::ptr::null_mut(),
            KVX_ERR_INVALID_ARGUMENT,
            "region 0",
        ),
        (&|spec| spec.memory = 5, KVX_ERR_INVALID_ARGUMENT, "memory = 5"),
    ] {
        let mut changed = spec;
        change(&mut changed);
        refused(register(&changed, 1, KVX_ROLE_SERVE, &mut pool), status, says);
        assert_eq!(pool, 0);
    }
    refused(register(&spec, 1, 0, &mut pool), KVX_ERR_INVALID_ARGUMENT, "role = 0");
    refused(
        register(&spec, 0, KVX_ROLE_SERVE, &mut pool),
        KVX_ERR_INVALID_ARGUMENT,
        "0 regions",
    );
    assert_eq!(RELEASED.load(Ordering::SeqCst), 0);

    ok(register(&spec, 1, KVX_ROLE_SERVE, &mut pool));
    let mut byte = 0u8;
    ok(c! { kvx_pool_copy_out(pool, 0, BLOCKS - 1, BLOCK_BYTES - 1, (&raw mut byte).cast(), 1) });
    assert_eq!(byte, 7);
    let (mut info, mut all, mut count) = (sized::<kvx_region_info>(), [sized::<kvx_region_info>(); 2], 0);
    c! {
        ok(kvx_pool_region(pool, 0, &mut info));
        ok(kvx_pool_regions(
            pool,
            all.as_mut_ptr(),
            size_of::<kvx_region_info>(),
            2,
            &mut count,
        ));
    }
    assert_eq!(
        (info.address, info.length, count, all[0].address),
        (spec.address, spec.length, 1, spec.address)
    );
    refused(
        c! { kvx_pool_region(pool, 1, &mut info) },
        KVX_ERR_OUT_OF_BOUNDS,
        "region 1",
    );

    ok(kvx_pool_free(pool));
    ok(kvx_layout_free(layout));
    ok(kvx_endpoint_destroy(endpoint, LONG_MS));
    assert_eq!(
        (RELEASED.load(Ordering::SeqCst), CALLED_INSIDE.load(Ordering::SeqCst)),
        (1, 1)
    );
}

#[test]
fn pools_are_closed_suspended_and_resumed() {
    let pair = pair();
    let (mut id, mut role, mut layout) = (9, 9, 0);
    ok(c! { kvx_pool_id(pair.source, &mut id, &mut role) });
    assert_eq!((id, role), (0, KVX_ROLE_BOTH));
    ok(c! { kvx_pool_layout(pair.source, &mut layout) });
    ok(kvx_layout_free(layout));
    ok(kvx_pool_suspend(pair.source));
    let none = std::ptr::null_mut();
    refused(
        c! { kvx_pool_id(pair.source, none, none) },
        KVX_ERR_NOT_REGISTERED,
        "suspended",
    );
    ok(kvx_pool_resume(pair.source));
    let offer = pair.offer("holds the pool");
    refused(kvx_pool_close(pair.source), KVX_ERR_BUSY, "");
    refused(kvx_pool_close_wait(pair.source, 5), KVX_ERR_BUSY, "");
    ok(kvx_handle_cancel(offer));
    ok(kvx_pool_close_wait(pair.source, LONG_MS));
    assert_eq!(end(offer).status, KVX_ERR_CANCELLED);
    ok(kvx_handle_free(offer));
    refused(kvx_pool_resume(pair.source), KVX_ERR_CLOSED, "closed");
    let mut byte = 0u8;
    let beyond = c! { kvx_pool_copy_out(pair.destination, 0, BLOCKS, 0, (&raw mut byte).cast(), 1) };
    refused(beyond, KVX_ERR_OUT_OF_BOUNDS, "block 64");
}

//! A forked child: every call is a clear status, and nothing of the parent's is touched.

#[macro_use]
mod support;

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use kvxfer_ffi::*;
use support::*;

static RELEASED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn released(_: *mut c_void) {
    RELEASED.store(true, Ordering::SeqCst);
}

/// What the child finds, as its exit code: 0 if all is as it should be, or the number of the first check that failed.
fn child(endpoint: kvx_endpoint, pool: kvx_pool, offer: kvx_offer) -> i32 {
    let mut config = 0;
    let unsupported = [
        c! { kvx_config_create(&mut config) },
        c! { kvx_endpoint_create(0, &mut config) },
        kvx_handle_cancel(offer),
        c! { kvx_handle_wait(offer, u64::MAX, null_mut()) },
        kvx_handle_free(offer),
        kvx_pool_free(pool),
        kvx_events_wait(endpoint, u64::MAX),
        kvx_endpoint_close(endpoint, u64::MAX),
        kvx_endpoint_destroy(endpoint, u64::MAX),
    ];
    if let Some(wrong) = unsupported.iter().position(|&status| status != KVX_ERR_UNSUPPORTED) {
        return 1 + i32::try_from(wrong).unwrap_or(100);
    }
    if !last_error().contains("forked child") {
        return 20;
    }
    if kvx_abi_version() != 2 || RELEASED.load(Ordering::SeqCst) {
        return 21;
    }
    0
}

/// Runs this in a child, and gives its exit code.
fn in_child(run: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child makes calls that touch nothing, and ends with `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let found = run();
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(found) };
    }
    let mut status = 0;
    // SAFETY: writes the local that it is given.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status), "the child crashed: {status}");
    libc::WEXITSTATUS(status)
}

#[test]
fn a_forked_child_touches_nothing() {
    // Before the parent has used the library, a child may.
    let early = in_child(|| {
        let mut config = 0;
        let created = c! { kvx_config_from_toml(c"".as_ptr(), &mut config) };
        i32::from(created != KVX_OK || kvx_config_free(config) != KVX_OK)
    });
    assert_eq!(early, 0);
    let endpoint = endpoint(c"parent");
    let layout = opaque();
    let mut memory = vec![0u8; (BLOCK_BYTES * BLOCKS) as usize];
    let mut spec: kvx_region_spec = sized();
    (spec.address, spec.length) = (memory.as_mut_ptr().cast(), memory.len() as u64);
    spec.release = Some(released);
    let (mut pool, mut offer) = (0, 0);
    c! {
        ok(kvx_pool_register(endpoint, layout, &spec, 1, KVX_ROLE_BOTH, &mut pool));
        ok(kvx_offer_open(
            endpoint,
            c"k".as_ptr().cast(),
            1,
            pool,
            std::ptr::null(),
            &mut offer,
        ));
    }
    assert_eq!(in_child(|| child(endpoint, pool, offer)), 0);

    // The parent goes on as if nothing had been.
    assert_eq!(c! { kvx_handle_poll(offer, null_mut()) }, KVX_PENDING);
    ok(kvx_handle_cancel(offer));
    assert_eq!(end(offer).status, KVX_ERR_CANCELLED);
    ok(kvx_handle_free(offer));
    ok(kvx_layout_free(layout));
    ok(kvx_pool_free(pool));
    ok(kvx_endpoint_destroy(endpoint, LONG_MS));
    assert!(RELEASED.load(Ordering::SeqCst));
}

//! Many threads that make, use, wait for and free handles of each other at random.

#[macro_use]
mod support;

use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use kvxfer_ffi::*;
use support::*;

const THREADS: u64 = 8;
const ROUNDS: usize = 1_500;
/// Handles that all threads see: whatever one puts there, another may use or free at any moment.
const SHARED: usize = 32;

/// A small generator, so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

#[test]
fn handles_of_everybody_used_by_everybody() {
    let pair = pair();
    let shared: [AtomicU64; SHARED] = std::array::from_fn(|_| AtomicU64::new(0));
    let (made, freed, stale) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let round = |random: &mut Random, thread: u64, number: usize| {
        c! {
            let place = &shared[random.below(SHARED as u64) as usize];
            let handle = place.load(Ordering::Relaxed);
            let block = [random.below(u64::from(BLOCKS)) as u32];
            let selection = blocks(0, &block);
            let key = format!("{thread}/{number}");
            let (bytes, length) = (key.as_ptr().cast(), key.len());
            let mut new = 0;
            let status = match random.below(14) {
                0 => kvx_offer_open(pair.prefill, bytes, length, pair.source, null(), &mut new),
                1 => {
                    let address = &raw const pair.address;
                    kvx_claim_open(
                        pair.decode,
                        bytes,
                        length,
                        pair.destination,
                        address,
                        1,
                        null(),
                        &mut new,
                    )
                }
                2 => kvx_pool_grant(pair.destination, &target(&selection), null(), &mut new),
                3 => kvx_layout_opaque(64, 4, &mut new),
                4 => kvx_endpoint_address(pair.prefill, &mut new),
                5 => kvx_grant_handle_grant(handle, &mut new),
                6 => kvx_push(pair.prefill, pair.source, &target(&selection), handle, null(), &mut new),
                7 => kvx_handle_wait(handle, random.below(3), null_mut()),
                8 => kvx_offer_append(handle, &selection, 1),
                9 => kvx_offer_finish(handle, 1),
                10 => kvx_claim_fill(handle, &selection, 1),
                11 => kvx_handle_cancel(handle),
                12 => kvx_handle_detach(handle),
                _ => {
                    let all = [
                        kvx_handle_free(handle),
                        kvx_layout_free(handle),
                        kvx_address_free(handle),
                        kvx_grant_free(handle),
                    ];
                    let gone = all.iter().filter(|&&status| status == KVX_OK).count();
                    assert!(gone <= 1, "one handle was freed {gone} times");
                    freed.fetch_add(gone, Ordering::Relaxed);
                    if gone == 1 { KVX_OK } else { KVX_ERR_INVALID_ARGUMENT }
                }
            };
            assert!(
                status <= KVX_PENDING && status != KVX_ERR_INTERNAL,
                "{status}: {}",
                last_error()
            );
            if status == KVX_ERR_INVALID_ARGUMENT && last_error().contains("it was freed") {
                stale.fetch_add(1, Ordering::Relaxed);
            }
            if new != 0 {
                made.fetch_add(1, Ordering::Relaxed);
                // What was there goes on being used by whoever has loaded it; its handle is freed here, or was.
                let old = place.swap(new, Ordering::Relaxed);
                let all = [
                    kvx_handle_free(old),
                    kvx_layout_free(old),
                    kvx_address_free(old),
                    kvx_grant_free(old),
                ];
                freed.fetch_add(
                    all.iter().filter(|&&status| status == KVX_OK).count(),
                    Ordering::Relaxed,
                );
            }
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let round = &round;
            scope.spawn(move || {
                let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ (thread + 1));
                for number in 0..ROUNDS {
                    round(&mut random, thread, number);
                }
            });
        }
    });
    let (made, stale) = (made.into_inner(), stale.into_inner());
    // The test did what it is for.
    assert!(made > 1_000 && stale > 100, "{made} made, {stale} stale");
    for place in &shared {
        let handle = place.load(Ordering::Relaxed);
        let _ = kvx_handle_free(handle);
        let _ = kvx_layout_free(handle);
        let _ = kvx_address_free(handle);
        let _ = kvx_grant_free(handle);
    }
}

/// Endpoints that are destroyed while other threads are in calls on them, some of which wait.
#[test]
fn endpoints_go_under_calls() {
    for _ in 0..5 {
        let endpoint = endpoint(c"going");
        let pool = pool(endpoint, KVX_ROLE_BOTH);
        std::thread::scope(|scope| {
            for thread in 0..4u32 {
                scope.spawn(move || {
                    for number in 0..200u32 {
                        let (key, mut offer) = ([thread, number], 0);
                        let status = c! { kvx_offer_open(endpoint, key.as_ptr().cast(), 8, pool, null(), &mut offer) };
                        assert!(
                            matches!(status, KVX_OK | KVX_ERR_CLOSED | KVX_ERR_INVALID_ARGUMENT),
                            "{status}: {}",
                            last_error()
                        );
                        if status == KVX_OK {
                            ok(kvx_handle_free(offer));
                        }
                        let _ = kvx_events_wait(endpoint, 0);
                    }
                });
            }
            scope.spawn(move || kvx_events_wait(endpoint, 300));
            std::thread::sleep(std::time::Duration::from_millis(3));
            ok(kvx_endpoint_destroy(endpoint, LONG_MS));
        });
        ok(kvx_pool_free(pool));
    }
}

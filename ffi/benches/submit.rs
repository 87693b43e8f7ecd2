//! What a submit costs through C, above what it costs in Rust: W5, 128 block ids in a pool of 160 planes of 8 KiB.
//!
//! Both ways are measured in turns in one process, each with a pair of endpoints of its own. A submit is a grant at one
//! endpoint and a push into it at the other; it is cancelled once it has been timed, so that the machine's loopback does
//! not become the measure. Figures are nanoseconds of the calls alone: the medians of each, and of the differences of
//! neighbours in time. `submit [ROUNDS]`; cargo bench -p kvxfer-ffi.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use kvxfer::layout::{DType, Geometry, PlaneKind, PlaneSpec, Sharding};
use kvxfer::{Endpoint, GrantOptions, Pool, PoolLayout, PushOptions, Role, Selection};
use kvxfer_ffi::*;

const PLANES: u32 = 160;
const TOKENS: u32 = 16;
const POOL_BLOCKS: u32 = 160;
const REQUEST_BLOCKS: u32 = 128;
const WAIT: Duration = Duration::from_secs(30);
const ROUNDS: usize = 2_000;
/// Rounds that only warm caches and connections up.
const WARM_UP: usize = 100;

/// Time of one submit: the grant, and the push.
struct Submit {
    grant: Duration,
    push: Duration,
}

fn request() -> Vec<u32> {
    // Neither sorted nor contiguous, as a paged cache hands them out.
    (0..REQUEST_BLOCKS)
        .map(|position| position * 37 % POOL_BLOCKS)
        .collect()
}

struct ThroughRust {
    endpoints: [Endpoint; 2],
    pools: [Pool; 2],
}

impl ThroughRust {
    fn new() -> ThroughRust {
        let mut builder = PoolLayout::builder();
        // 16 tokens, 2 heads of 128 elements of 2 bytes: 8 KiB.
        let geometry = Geometry::attention(DType::Bf16, TOKENS, 2, 128, Sharding::NONE);
        let group = builder.group("attention", geometry, POOL_BLOCKS);
        for layer in 0..PLANES / 2 {
            builder.plane(PlaneSpec::new(group, layer.to_string(), PlaneKind::Key));
            builder.plane(PlaneSpec::new(group, layer.to_string(), PlaneKind::Value));
        }
        let layout = builder.build().unwrap();
        let endpoints = ["from", "to"].map(|name| {
            let builder = Endpoint::builder().name(name).transports(["tcp"]);
            builder.listen("127.0.0.1:0".parse().unwrap()).build().unwrap()
        });
        endpoints[0].connect(&endpoints[1].address(), WAIT).unwrap();
        let pools = [0, 1].map(|at: usize| endpoints[at].allocate(layout.clone(), Role::Both).unwrap());
        ThroughRust { endpoints, pools }
    }

    fn submit(&self, blocks: &[u32]) -> Submit {
        let selection = || Selection::single(0, REQUEST_BLOCKS * TOKENS, blocks.to_vec());
        let begun = Instant::now();
        let grant = self.pools[1].grant(selection(), GrantOptions::default()).unwrap();
        let granted = begun.elapsed();
        let begun = Instant::now();
        let push = self.endpoints[0].push(&self.pools[0], selection(), grant.grant(), PushOptions::default());
        let pushed = begun.elapsed();
        let push = push.unwrap();
        push.cancel();
        grant.cancel();
        let _ = push.done().wait(WAIT);
        let _ = grant.arrived().wait(WAIT);
        Submit {
            grant: granted,
            push: pushed,
        }
    }
}

struct ThroughC {
    endpoints: [kvx_endpoint; 2],
    pools: [kvx_pool; 2],
}

impl ThroughC {
    fn new() -> ThroughC {
        let (mut layout, mut address) = (0, 0);
        let (mut endpoints, mut pools) = ([0; 2], [0; 2]);
        let model = c"[[model]]\nname = \"w5\"\ndtype = \"bf16\"\n[[model.group]]\nname = \"attention\"\n\
            kind = \"attention\"\nlayers = [{ first = 0, end = 80 }]\nkv_heads = 2\nhead_size = 128\n";
        let mut spec = kvx_preset_spec {
            struct_size: size_of::<kvx_preset_spec>() as u32,
            arrangement: KVX_ARRANGEMENT_PER_LAYER,
            model: c"w5".as_ptr(),
            models_toml: model.as_ptr(),
            tensor_rank: 0,
            tensor_size: 1,
            tokens_per_block: TOKENS,
            blocks: POOL_BLOCKS,
            heads_first: 0,
            first_layer: 0,
            layer_end: 0,
        };
        // SAFETY: pointers to locals and constants, for the calls.
        unsafe {
            ok(kvx_layout_preset(&raw mut spec, &mut layout));
            let mut config = 0;
            ok(kvx_config_from_toml(c"transports = [\"tcp\"]".as_ptr(), &mut config));
            for at in 0..2 {
                ok(kvx_endpoint_create(config, &mut endpoints[at]));
                ok(kvx_pool_allocate(endpoints[at], layout, KVX_ROLE_BOTH, &mut pools[at]));
            }
            ok(kvx_config_free(config));
            ok(kvx_endpoint_address(endpoints[1], &mut address));
        }
        ok(kvx_endpoint_connect(endpoints[0], address, 30_000));
        ok(kvx_layout_free(layout));
        ok(kvx_address_free(address));
        ThroughC { endpoints, pools }
    }

    fn submit(&self, blocks: &[u32]) -> Submit {
        let selection = kvx_group_selection {
            first_token: 0,
            token_end: REQUEST_BLOCKS * TOKENS,
            blocks: blocks.as_ptr(),
            block_count: blocks.len(),
        };
        let target = kvx_target {
            struct_size: size_of::<kvx_target>() as u32,
            reserved: 0,
            groups: &selection,
            group_count: 1,
            layers: null(),
            layer_count: 0,
            heads: null(),
            head_count: 0,
            descriptors: null(),
            descriptor_count: 0,
        };
        let (mut owned, mut grant, mut push) = (0, 0, 0);
        // SAFETY: pointers to locals, for the calls.
        let submit = unsafe {
            let begun = Instant::now();
            let status = kvx_pool_grant(self.pools[1], &target, null(), &mut owned);
            let granted = begun.elapsed();
            ok(status);
            // What the peer has, once it has read the grant's bytes.
            ok(kvx_grant_handle_grant(owned, &mut grant));
            let begun = Instant::now();
            let status = kvx_push(self.endpoints[0], self.pools[0], &target, grant, null(), &mut push);
            let pushed = begun.elapsed();
            ok(status);
            Submit {
                grant: granted,
                push: pushed,
            }
        };
        for handle in [push, owned] {
            ok(kvx_handle_cancel(handle));
        }
        for handle in [push, owned] {
            // SAFETY: nothing is pointed to.
            unsafe { kvx_handle_wait(handle, 30_000, null_mut()) };
            ok(kvx_handle_free(handle));
        }
        ok(kvx_grant_free(grant));
        submit
    }
}

impl Drop for ThroughC {
    fn drop(&mut self) {
        for at in 0..2 {
            kvx_pool_free(self.pools[at]);
            kvx_endpoint_destroy(self.endpoints[at], 30_000);
        }
    }
}

fn ok(status: kvx_status) {
    assert_eq!(status, KVX_OK);
}

fn median(mut values: Vec<i64>) -> i64 {
    values.sort_unstable();
    values[values.len() / 2]
}

fn row(what: &str, rust: &[Submit], c: &[Submit], time: impl Fn(&Submit) -> Duration) {
    let ns = |submit: &Submit| time(submit).as_nanos() as i64;
    let difference = rust.iter().zip(c).map(|(rust, c)| ns(c) - ns(rust));
    let (in_rust, in_c) = (
        median(rust.iter().map(ns).collect()),
        median(c.iter().map(ns).collect()),
    );
    println!(
        "{what:<14} {in_rust:>10} {in_c:>10} {:>10}",
        median(difference.collect())
    );
}

fn main() {
    let rounds = std::env::args()
        .skip(1)
        .find_map(|argument| argument.parse().ok())
        .unwrap_or(ROUNDS);
    let (through_rust, through_c, blocks) = (ThroughRust::new(), ThroughC::new(), request());
    let (mut rust, mut c) = (Vec::new(), Vec::new());
    for round in 0..WARM_UP + rounds {
        // In turns, and each first as often as the other.
        let (one, other) = if round % 2 == 0 {
            let one = through_rust.submit(&blocks);
            (one, through_c.submit(&blocks))
        } else {
            let other = through_c.submit(&blocks);
            (through_rust.submit(&blocks), other)
        };
        if round >= WARM_UP {
            rust.push(one);
            c.push(other);
        }
    }
    println!("W5 submit, {rounds} rounds: medians in nanoseconds");
    println!("{:<14} {:>10} {:>10} {:>10}", "", "Rust", "C", "difference");
    row("grant", &rust, &c, |submit| submit.grant);
    row("push", &rust, &c, |submit| submit.push);
    row("grant + push", &rust, &c, |submit| submit.grant + submit.push);
    drop(through_rust.pools);
    for endpoint in &through_rust.endpoints {
        endpoint.close(WAIT).unwrap();
    }
}

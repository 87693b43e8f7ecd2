//! What the tests of the C interface share.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::ffi::{CStr, c_char};
use std::mem::size_of;

use kvxfer_ffi::*;

/// Calls of the interface as a C program makes them.
macro_rules! c {
    ($($calls:tt)*) => {{
        // SAFETY: what is passed is a local of the test that outlives the call, or what the interface says that it refuses
        // before it believes it: null, a wrong length, a wrong size, a handle that is none.
        unsafe { $($calls)* }
    }};
}

/// Far longer than anything here takes.
pub const LONG_MS: u64 = 30_000;
pub const BLOCK_BYTES: u32 = 4096;
pub const BLOCKS: u32 = 64;

/// The text that a function of the (buffer, capacity) kind gives.
pub fn text(mut call: impl FnMut(*mut c_char, usize) -> i64) -> String {
    let length = call(std::ptr::null_mut(), 0);
    assert!(length >= 0, "{}", last_error());
    let mut buffer = vec![0u8; usize::try_from(length).unwrap() + 4096];
    let length = call(buffer.as_mut_ptr().cast(), buffer.len());
    assert!(length >= 0, "{}", last_error());
    CStr::from_bytes_until_nul(&buffer)
        .unwrap()
        .to_str()
        .unwrap()
        .to_owned()
}

/// This thread's last error.
pub fn last_error() -> String {
    let mut buffer = [0u8; 2048];
    let length = c! { kvx_last_error_message(buffer.as_mut_ptr().cast(), buffer.len()) };
    assert!(length >= 0);
    CStr::from_bytes_until_nul(&buffer)
        .unwrap()
        .to_str()
        .unwrap()
        .to_owned()
}

#[track_caller]
pub fn ok(status: kvx_status) {
    assert_eq!(status, KVX_OK, "{}", last_error());
}

/// The call was refused with this status, and its message says this.
#[track_caller]
pub fn refused(status: impl Into<i64>, wanted: kvx_status, says: &str) {
    let message = last_error();
    assert_eq!(status.into(), i64::from(wanted), "{message}");
    assert!(message.contains(says), "{message:?} does not say {says:?}");
}

/// A struct of zeros that states its size.
pub fn sized<T>() -> T {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: the first field of each is its size; all of them are numbers and pointers, of which zeros are valid values.
    unsafe {
        value
            .as_mut_ptr()
            .cast::<u32>()
            .write(u32::try_from(size_of::<T>()).unwrap());
        value.assume_init()
    }
}

pub fn endpoint(name: &CStr) -> kvx_endpoint {
    let (mut config, mut endpoint) = (0, 0);
    c! {
        ok(kvx_config_from_toml(c"transports = [\"tcp\"]".as_ptr(), &mut config));
        ok(kvx_config_set(config, c"name".as_ptr(), name.as_ptr()));
        ok(kvx_endpoint_create(config, &mut endpoint));
    }
    ok(kvx_config_free(config));
    endpoint
}

pub fn opaque() -> kvx_layout {
    let mut layout = 0;
    ok(c! { kvx_layout_opaque(BLOCK_BYTES, BLOCKS, &mut layout) });
    layout
}

pub fn pool(endpoint: kvx_endpoint, role: kvx_role) -> kvx_pool {
    let (layout, mut pool) = (opaque(), 0);
    ok(c! { kvx_pool_allocate(endpoint, layout, role, &mut pool) });
    ok(kvx_layout_free(layout));
    pool
}

pub fn address(endpoint: kvx_endpoint) -> kvx_address {
    let mut address = 0;
    ok(c! { kvx_endpoint_address(endpoint, &mut address) });
    address
}

/// Two endpoints with a pool each: one that serves and one that receives.
pub struct Pair {
    pub prefill: kvx_endpoint,
    pub decode: kvx_endpoint,
    pub source: kvx_pool,
    pub destination: kvx_pool,
    pub address: kvx_address,
}

pub fn pair() -> Pair {
    let (prefill, decode) = (endpoint(c"prefill-0"), endpoint(c"decode-0"));
    Pair {
        prefill,
        decode,
        source: pool(prefill, KVX_ROLE_BOTH),
        destination: pool(decode, KVX_ROLE_BOTH),
        address: address(prefill),
    }
}

impl Pair {
    pub fn offer(&self, key: &str) -> kvx_offer {
        let mut options: kvx_offer_options = sized();
        (options.events, options.event_data) = (1, 10);
        let mut offer = 0;
        let (bytes, length) = (key.as_ptr().cast(), key.len());
        ok(c! { kvx_offer_open(self.prefill, bytes, length, self.source, &options, &mut offer) });
        offer
    }

    pub fn claim(&self, key: &str) -> kvx_claim {
        let mut options: kvx_claim_options = sized();
        (options.events, options.event_data) = (1, 20);
        let mut claim = 0;
        let (bytes, length) = (key.as_ptr().cast(), key.len());
        ok(c! {
            kvx_claim_open(
                self.decode,
                bytes,
                length,
                self.destination,
                &self.address,
                1,
                &options,
                &mut claim,
            )
        });
        claim
    }

    /// Fills blocks of the source with a byte of their own.
    pub fn compute(&self, blocks: &[u32], salt: u8) {
        for &block in blocks {
            let bytes = [block as u8 ^ salt; BLOCK_BYTES as usize];
            ok(c! { kvx_pool_copy_in(self.source, 0, block, 0, bytes.as_ptr().cast(), bytes.len()) });
        }
    }

    /// Whether blocks of the destination hold what these blocks of the source did.
    pub fn verify(&self, from: &[u32], to: &[u32], salt: u8) {
        for (&from, &to) in from.iter().zip(to) {
            let mut bytes = [0u8; BLOCK_BYTES as usize];
            ok(c! { kvx_pool_copy_out(self.destination, 0, to, 0, bytes.as_mut_ptr().cast(), bytes.len()) });
            assert_eq!(bytes, [from as u8 ^ salt; BLOCK_BYTES as usize], "block {to}");
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        ok(kvx_address_free(self.address));
        for pool in [self.source, self.destination] {
            ok(kvx_pool_free(pool));
        }
        for endpoint in [self.prefill, self.decode] {
            ok(kvx_endpoint_destroy(endpoint, LONG_MS));
        }
    }
}

/// The selection of whole blocks of an opaque pool, from a position on.
pub fn blocks(first: u32, blocks: &[u32]) -> kvx_group_selection {
    kvx_group_selection {
        first_token: first,
        token_end: first + u32::try_from(blocks.len()).unwrap(),
        blocks: blocks.as_ptr(),
        block_count: blocks.len(),
    }
}

pub fn target(selection: &kvx_group_selection) -> kvx_target {
    let mut target: kvx_target = sized();
    (target.groups, target.group_count) = (selection, 1);
    target
}

/// Waits for the end, and gives it.
pub fn end(handle: kvx_handle) -> kvx_result {
    let mut result = sized();
    let status = c! { kvx_handle_wait(handle, LONG_MS, &mut result) };
    assert_ne!(status, KVX_PENDING);
    assert_eq!(status, result.status);
    result
}

/// Drains events until one of this kind and number comes.
pub fn event(endpoint: kvx_endpoint, kind: kvx_event_kind, data: u64) -> kvx_event {
    loop {
        ok(kvx_events_wait(endpoint, LONG_MS));
        let (mut event, mut count): (kvx_event, usize) = (sized(), 0);
        ok(c! { kvx_events_drain(endpoint, &mut event, size_of::<kvx_event>(), 1, &mut count) });
        if count == 1 && (event.kind, event.data) == (kind, data) {
            return event;
        }
    }
}

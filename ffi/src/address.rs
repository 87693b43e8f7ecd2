//! Endpoint addresses: what engines publish.

use std::ffi::{c_char, c_void};

use kvxfer::{EndpointAddress, Incarnation, Result};

use crate::call::call;
use crate::input::{self, PORTABLE_BYTES_MAX, VALUE_BYTES_MAX, grows};
use crate::output::{Out, OutBytes, OutStruct, OutText};
use crate::status::kvx_status;
use crate::table;

/// An endpoint's address: its sockets, incarnation and ranks. Freed by kvx_address_free.
pub type kvx_address = u64;

/// 128 bits, highest byte first: an incarnation, or the number of a claim set. All zeros say "none".
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct kvx_id128 {
    /// The bytes, in the order in which their hexadecimal form is read.
    pub bytes: [u8; 16],
}

impl kvx_id128 {
    pub(crate) fn of(bits: u128) -> kvx_id128 {
        kvx_id128 {
            bytes: bits.to_be_bytes(),
        }
    }

    /// `None` for all zeros.
    pub(crate) fn bits(self) -> Option<u128> {
        match u128::from_be_bytes(self.bytes) {
            0 => None,
            bits => Some(bits),
        }
    }
}

/// What an address says.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvx_address_info {
    /// sizeof(kvx_address_info), set by the caller.
    pub struct_size: u32,
    /// Sockets in it: 1 or 2.
    pub sockets: u32,
    /// Whom it means; zeros in a bare host:port, which means whoever listens there.
    pub incarnation: kvx_id128,
    /// Tensor-parallel rank.
    pub tensor_rank: u16,
    /// Tensor-parallel ranks.
    pub tensor_size: u16,
    /// Pipeline-parallel rank.
    pub pipeline_rank: u16,
    /// Pipeline-parallel ranks.
    pub pipeline_size: u16,
}
grows!(kvx_address_info, 32);

/// Reads the text form: what kvx_address_text gave, or a bare "host:port" with a numeric host.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_address_parse(text: *const c_char, address: *mut kvx_address) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, text) = unsafe {
            (
                Out::handle("address", address)?,
                input::text("text", text, VALUE_BYTES_MAX)?,
            )
        };
        out.put(table::insert(text.parse::<EndpointAddress>()?)?);
        Ok(())
    })
}

/// Reads the byte form: what kvx_address_bytes gave.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_address_from_bytes(
    bytes: *const c_void,
    length: usize,
    address: *mut kvx_address,
) -> kvx_status {
    call(|| {
        // SAFETY: the caller's pointers, as the crate's contract says.
        let (out, bytes) = unsafe {
            (
                Out::handle("address", address)?,
                input::short_bytes("an address", bytes, length, PORTABLE_BYTES_MAX)?,
            )
        };
        out.put(table::insert(EndpointAddress::from_bytes(bytes)?)?);
        Ok(())
    })
}

/// The text form, at most 127 bytes: what to publish. Gives the text's length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_address_text(address: kvx_address, buffer: *mut c_char, capacity: usize) -> i64 {
    call(|| {
        let address = table::get::<EndpointAddress>(address)?;
        // SAFETY: the caller's buffer, as the crate's contract says.
        let out = unsafe { OutText::new(buffer, capacity)? };
        Ok(out.put(&address.to_string()))
    })
}

/// The byte form, at most 73 bytes. Gives their number; writes them only if they all fit.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_address_bytes(address: kvx_address, buffer: *mut c_void, capacity: usize) -> i64 {
    call(|| {
        let address = table::get::<EndpointAddress>(address)?;
        // SAFETY: the caller's buffer, as the crate's contract says.
        let out = unsafe { OutBytes::new(buffer, capacity)? };
        Ok(out.put(&address.to_bytes()))
    })
}

/// What it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvx_address_describe(address: kvx_address, info: *mut kvx_address_info) -> kvx_status {
    call(|| {
        let address = table::get::<EndpointAddress>(address)?;
        // SAFETY: the caller's struct, as the crate's contract says.
        let out = unsafe { OutStruct::new(info)? };
        out.put(kvx_address_info {
            struct_size: 0,
            sockets: u32::try_from(address.sockets.len()).unwrap_or(u32::MAX),
            incarnation: kvx_id128::of(address.incarnation.map_or(0, Incarnation::bits)),
            tensor_rank: address.rank.tensor.0,
            tensor_size: address.rank.tensor.1,
            pipeline_rank: address.rank.pipeline.0,
            pipeline_size: address.rank.pipeline.1,
        });
        Ok(())
    })
}

/// Frees an address.
#[unsafe(no_mangle)]
pub extern "C" fn kvx_address_free(address: kvx_address) -> kvx_status {
    call(|| table::remove::<EndpointAddress>(address).map(drop))
}

/// The addresses behind an array of handles.
///
/// # Safety
/// `addresses` is null, or points to `count` handles.
pub(crate) unsafe fn addresses(addresses: *const kvx_address, count: usize) -> Result<Vec<EndpointAddress>> {
    // SAFETY: the caller's word.
    let handles = unsafe { input::array("addresses", addresses, count)? };
    let found = handles
        .iter()
        .map(|&handle| table::get::<EndpointAddress>(handle).map(|address| (*address).clone()));
    found.collect()
}

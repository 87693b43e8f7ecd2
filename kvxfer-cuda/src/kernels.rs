//! The copy kernels: PTX, which the driver compiles for its device. `kernels/copy.cu` is what it was made of.

use std::ffi::CStr;

/// Copies pieces of device memory into staging, and those of staging into device memory.
pub(crate) const GATHER: &CStr = c"kvx_gather";
pub(crate) const SCATTER: &CStr = c"kvx_scatter";

const IMAGE: &[u8] = concat!(include_str!("kernels/copy.ptx"), "\0").as_bytes();

/// The PTX, as a C string.
pub(crate) fn image() -> Option<&'static CStr> {
    CStr::from_bytes_with_nul(IMAGE).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_has_both_kernels() {
        let text = image().unwrap().to_str().unwrap();
        for name in [GATHER, SCATTER] {
            assert!(text.contains(&format!(".entry {}(", name.to_str().unwrap())));
        }
    }
}

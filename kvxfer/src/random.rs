//! Random bits from the system: identities, secrets, set numbers.

use rustix::rand::{GetRandomFlags, getrandom};

use kvxfer_core::{Error, ErrorKind, Result};

/// 128 random bits.
pub(crate) fn bits() -> Result<u128> {
    let mut bytes = [0u8; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(more) => filled += more,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => {
                return Err(Error::new(ErrorKind::ResourceExhausted, "getrandom").because(errno.to_string()));
            }
        }
    }
    Ok(u128::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    #[test]
    fn draws_differ() {
        assert_ne!(super::bits().unwrap(), super::bits().unwrap());
    }
}

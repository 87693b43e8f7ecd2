//! Numbers that nobody can guess from earlier ones: packet sequence numbers of new queue pairs.

/// 24 random bits.
pub(crate) fn bits24() -> u32 {
    let mut bytes = [0u8; 4];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(4) => {}
        // Cannot be for four bytes once the system has started; the clock is better than a constant.
        _ => bytes = (crate::clock::now().as_nanos() as u32).to_le_bytes(),
    }
    u32::from_le_bytes(bytes) & 0xff_ffff
}

//! Which host this is: endpoints on one may share memory.

use std::sync::OnceLock;

use kvxfer_core::wire::lane::PayloadChecksum;

/// Bytes of a host's name.
const NAME_BYTES: usize = 8;

/// A number of this host and boot, or zeros if the system does not say. Containers of one host have the same.
///
/// It is a digest of the kernel's `boot_id`, so that peers do not learn that. Two hosts that have the same by chance find out
/// when one cannot map the other's memory.
pub(crate) fn name() -> [u8; NAME_BYTES] {
    static NAME: OnceLock<[u8; NAME_BYTES]> = OnceLock::new();
    *NAME.get_or_init(|| {
        let Ok(boot) = std::fs::read("/proc/sys/kernel/random/boot_id") else {
            return [0; NAME_BYTES];
        };
        let mut digest = PayloadChecksum::new();
        digest.update(b"kvxfer host of boot ");
        digest.update(&boot);
        digest.value().to_le_bytes()
    })
}

/// Whether this name, as a peer's advert has it, is that of this host. Later versions may append to it.
pub(crate) fn is_here(advertised: &[u8]) -> bool {
    let own = name();
    own != [0; NAME_BYTES] && advertised.first_chunk() == Some(&own)
}

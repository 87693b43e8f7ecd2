//! The system's limits on registered memory, for the error that says which of them was hit.

use std::fs;

/// What the system allows this process, read when a registration was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct MemoryLimits {
    /// `RLIMIT_MEMLOCK` in bytes; `None`: unlimited.
    pub(super) memlock: Option<u64>,
    /// Bytes that are pinned already (`VmPin`), if the kernel says.
    pub(super) pinned: Option<u64>,
    /// `vm.max_map_count`.
    pub(super) max_map_count: Option<u64>,
}

impl MemoryLimits {
    pub(super) fn read() -> MemoryLimits {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        MemoryLimits {
            memlock: rustix::process::getrlimit(rustix::process::Resource::Memlock).current,
            pinned: kibibytes(&status, "VmPin:"),
            max_map_count: fs::read_to_string("/proc/sys/vm/max_map_count")
                .ok()
                .and_then(|text| text.trim().parse().ok()),
        }
    }
}

fn kibibytes(status: &str, key: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    let number: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    number.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_status_is_understood() {
        assert_eq!(kibibytes("VmLck:\t 0 kB\nVmPin:\t   64 kB\n", "VmPin:"), Some(65536));
        assert_eq!(kibibytes("VmPin: many\n", "VmPin:"), None);
        let limits = MemoryLimits::read();
        assert!(limits.max_map_count.is_some_and(|count| count > 0));
    }
}

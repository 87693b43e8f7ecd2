//! Why a verb refused: what can be told by comparing what was asked with what the device and the system allow.

use super::context::Context;
use super::error::VerbsError;
use super::limits::MemoryLimits;
use super::memory::Access;
use super::port::{Mtu, PortState};
use super::queue_pair::{QpState, QueuePair, QueuePairCapacity};
use crate::sys;
use crate::text::bytes;

/// Why memory could not be registered.
pub(super) fn explain_registration(
    context: &Context,
    verb: &'static str,
    errno: i32,
    length: u64,
    access: Access,
) -> VerbsError {
    let error = context.refused(verb, errno);
    let need = bytes(length);
    match errno {
        libc::ENOMEM | libc::EAGAIN | libc::EPERM => {
            memory_refused(error, &MemoryLimits::read(), context.attributes().max_mr, length)
        },
        libc::EINVAL if length > context.attributes().max_mr_size => error
            .because(format!(
                "{need} were asked for, the device registers at most {}",
                bytes(context.attributes().max_mr_size)
            ))
            .with_remedy("register it in smaller pieces"),
        libc::EINVAL if access.remote_write && !access.local_write => {
            error.because("remote write was asked for without local write")
        }
        libc::EFAULT => error
            .because(format!("{need} there are not mapped, or not in a way that a device may use"))
            .with_remedy("register memory that is mapped and writable; device memory needs a dmabuf or peer memory"),
        libc::EOPNOTSUPP | libc::EPROTONOSUPPORT if verb == "ibv_reg_dmabuf_mr" => error
            .because("the device or its driver cannot register dmabufs")
            .with_remedy("use a device whose driver can (mlx5 with kernel 5.12, irdma, bnxt_re, …), or stage through host memory"),
        _ => error.because(format!("{need} were to be registered")),
    }
}

fn memory_refused(error: VerbsError, limits: &MemoryLimits, max_mr: u32, length: u64) -> VerbsError {
    let need = bytes(length);
    match (limits.memlock, limits.pinned) {
        (Some(limit), pinned) if pinned.unwrap_or(0).saturating_add(length) > limit => {
            let used = match pinned {
                Some(pinned) if pinned > 0 => format!(", of which {} are used", bytes(pinned)),
                _ => String::new(),
            };
            error
                .because(format!("ulimit -l is {}{used}; this registration needs {need}", bytes(limit)))
                .with_remedy(
                    "raise memlock: `ulimit -l unlimited`, LimitMEMLOCK=infinity (systemd), \
                     `--ulimit memlock=-1` (containers), or give the process CAP_IPC_LOCK",
                )
        }
        _ => error
            .because(format!(
                "{need} were to be registered; the limit of locked memory is not what refused them ({})",
                limits.memlock.map_or("unlimited".to_owned(), bytes)
            ))
            .with_remedy(format!(
                "check free memory, vm.max_map_count ({}), and the device's registrations (at most {}; `rdma resource`)",
                limits.max_map_count.map_or("unknown".to_owned(), |count| count.to_string()),
                max_mr
            )),
    }
}

/// Why a queue pair could not be created.
pub(super) fn explain_capacity(context: &Context, errno: i32, capacity: &QueuePairCapacity) -> VerbsError {
    let limits = context.attributes();
    let mut over = Vec::new();
    let mut check = |what: &str, asked: u32, limit: u32| {
        if asked > limit {
            over.push(format!("{what} {asked} (at most {limit})"));
        }
    };
    check("send work requests", capacity.send_requests, limits.max_qp_wr);
    check("receives", capacity.receive_requests, limits.max_qp_wr);
    check("send segments", capacity.send_segments, limits.max_sge);
    check("receive segments", capacity.receive_segments, limits.max_sge);
    let error = context.refused("ibv_create_qp", errno);
    match (over.is_empty(), errno) {
        (false, _) => error
            .because(format!("more than the device allows: {}", over.join(", ")))
            .with_remedy("configure a smaller send depth or fewer segments"),
        (true, libc::ENOMEM | libc::ENOSPC) => error
            .because(format!("the device has {} queue pairs in all", limits.max_qp))
            .with_remedy("configure fewer queue pairs per peer; `rdma resource` shows who holds them; memlock counts too"),
        (true, libc::EINVAL) => error.because(format!(
            "{} send work requests of {} segments with {} inline bytes, {} receives: fewer segments or inline bytes may fit",
            capacity.send_requests, capacity.send_segments, capacity.inline_bytes, capacity.receive_requests
        )),
        _ => error,
    }
}

/// Why a queue pair did not change its state.
pub(super) fn explain_modify(pair: &QueuePair, errno: i32, wanted: &sys::ibv_qp_attr) -> VerbsError {
    let context = pair.context();
    let to = QpState::from_raw(wanted.qp_state);
    let step = format!("queue pair {:#x} to {}", pair.number(), to.name());
    let error = context.refused("ibv_modify_qp", errno);
    match errno {
        libc::EINVAL => {
            let faults = faults(pair, to, wanted);
            if faults.is_empty() {
                error
                    .because(format!("{step}, with {}", attributes(to, wanted)))
                    .with_remedy("none of these is out of the device's range: see `dmesg`")
            } else {
                error
                    .because(format!("{step}: {}", faults.join("; ")))
                    .with_remedy("correct the setting named, or the peer's")
            }
        }
        libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ETIMEDOUT | libc::EADDRNOTAVAIL | libc::ENODATA => {
            error.because(format!("{step}: the peer's address {} does not resolve", gid(wanted)))
        }
        _ => error.because(step),
    }
}

/// What is out of range or out of order in the attributes of a state change.
fn faults(pair: &QueuePair, to: QpState, wanted: &sys::ibv_qp_attr) -> Vec<String> {
    let context = pair.context();
    let limits = context.attributes();
    let mut faults = Vec::new();
    let before = match to {
        QpState::Init => Some(QpState::Reset),
        QpState::ReadyToReceive => Some(QpState::Init),
        QpState::ReadyToSend => Some(QpState::ReadyToReceive),
        _ => None,
    };
    if let (Some(before), Ok(now)) = (before, pair.state())
        && before != now
    {
        faults.push(format!("it is in {}, not in {}", now.name(), before.name()));
    }
    let mut at_most = |what: &str, value: u32, limit: u32| {
        if value > limit {
            faults.push(format!("{what} {value} is above {limit}"));
        }
    };
    match to {
        QpState::Init => {
            at_most("port", u32::from(wanted.port_num), u32::from(limits.ports));
            if let Ok(port) = context.port(wanted.port_num) {
                let last = u32::from(port.pkey_table_length).saturating_sub(1);
                at_most("pkey index", u32::from(wanted.pkey_index), last);
            }
        }
        QpState::ReadyToReceive => {
            at_most("peer queue pair", wanted.dest_qp_num, (1 << 24) - 1);
            at_most("peer PSN", wanted.rq_psn, (1 << 24) - 1);
            at_most("rnr timer", u32::from(wanted.min_rnr_timer), 31);
            at_most("service level", u32::from(wanted.ah_attr.sl), 15);
            at_most(
                "read depth as target",
                u32::from(wanted.max_dest_rd_atomic),
                limits.max_qp_rd_atom,
            );
            receive_faults(context, wanted, &mut faults);
        }
        QpState::ReadyToSend => {
            at_most("PSN", wanted.sq_psn, (1 << 24) - 1);
            at_most("timeout", u32::from(wanted.timeout), 31);
            at_most("retry count", u32::from(wanted.retry_cnt), 7);
            at_most("rnr retry", u32::from(wanted.rnr_retry), 7);
            at_most(
                "read depth as origin",
                u32::from(wanted.max_rd_atomic),
                limits.max_qp_init_rd_atom,
            );
        }
        _ => {}
    }
    faults
}

/// What the port does not allow in a step to RTR.
fn receive_faults(context: &Context, wanted: &sys::ibv_qp_attr, faults: &mut Vec<String>) {
    let number = wanted.ah_attr.port_num;
    let Ok(port) = context.port(number) else {
        faults.push(format!("port {number} cannot be queried"));
        return;
    };
    if port.state != PortState::Active {
        faults.push(format!("port {number} is not active ({:?})", port.state));
    }
    if Mtu::from_raw(wanted.path_mtu).is_none_or(|mtu| mtu > port.active_mtu) {
        faults.push(format!(
            "path MTU {} is above the port's active MTU {}",
            128u64 << wanted.path_mtu.min(6),
            port.active_mtu
        ));
    }
    if wanted.ah_attr.is_global == 0 {
        if port.link_layer == super::port::LinkLayer::Ethernet {
            faults.push("RoCE needs the peer's GID".to_owned());
        }
        return;
    }
    let index = u32::from(wanted.ah_attr.grh.sgid_index);
    match context.gids(number) {
        Ok(entries) if !entries.iter().any(|entry| entry.index == index) => {
            faults.push(format!("GID index {index} of port {number} is empty"));
        }
        _ => {}
    }
}

fn attributes(to: QpState, wanted: &sys::ibv_qp_attr) -> String {
    match to {
        QpState::Init => format!("port {}, pkey index {}", wanted.port_num, wanted.pkey_index),
        QpState::ReadyToReceive => format!(
            "peer queue pair {:#x}, PSN {}, MTU code {}, LID {}, GID {} from index {}, service level {}, read depth {}, rnr timer {}",
            wanted.dest_qp_num,
            wanted.rq_psn,
            wanted.path_mtu,
            wanted.ah_attr.dlid,
            gid(wanted),
            wanted.ah_attr.grh.sgid_index,
            wanted.ah_attr.sl,
            wanted.max_dest_rd_atomic,
            wanted.min_rnr_timer
        ),
        QpState::ReadyToSend => format!(
            "PSN {}, timeout {}, retries {}, rnr retries {}, read depth {}",
            wanted.sq_psn, wanted.timeout, wanted.retry_cnt, wanted.rnr_retry, wanted.max_rd_atomic
        ),
        _ => "no attribute".to_owned(),
    }
}

fn gid(wanted: &sys::ibv_qp_attr) -> String {
    // SAFETY: every bit pattern is a GID.
    let raw = unsafe { wanted.ah_attr.grh.dgid.raw };
    std::net::Ipv6Addr::from(raw).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(memlock: Option<u64>, pinned: Option<u64>) -> String {
        let limits = MemoryLimits {
            memlock,
            pinned,
            max_map_count: Some(65530),
        };
        let error = VerbsError::refused("ibv_reg_mr", "mlx5_0", libc::ENOMEM);
        kvxfer_core::Error::from(memory_refused(error, &limits, 1000, 12 << 30)).to_string()
    }

    #[test]
    fn the_limit_of_locked_memory_is_named_with_the_need() {
        let text = refused(Some(64 << 10), Some(0));
        assert!(
            text.contains("ulimit -l is 64 KiB; this registration needs 12 GiB"),
            "{text}"
        );
        assert!(
            text.contains("raise memlock") && text.contains("device mlx5_0"),
            "{text}"
        );
        let text = refused(Some(16 << 30), Some(8 << 30));
        assert!(text.contains("ulimit -l is 16 GiB, of which 8 GiB are used"), "{text}");
    }

    #[test]
    fn where_it_is_not_that_limit_the_others_are_named() {
        for text in [refused(None, None), refused(Some(64 << 30), Some(1))] {
            assert!(text.contains("is not what refused them"), "{text}");
            assert!(
                text.contains("vm.max_map_count (65530)") && text.contains("at most 1000"),
                "{text}"
            );
        }
    }
}

//! The generated types against the system's `<infiniband/verbs.h>`, where a C compiler and the header are installed.
//!
//! A type that differs would make the kernel or a provider write somewhere else than we read.
#![allow(clippy::print_stdout)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use kvxfer_rdma::sys;

/// What C and Rust say of one thing.
struct Check {
    name: String,
    c: String,
    rust: u64,
}

macro_rules! layouts {
    ($checks:ident: $($name:ident { $($field:ident),* $(,)? })*) => {$(
        $checks.push(Check {
            name: concat!("sizeof ", stringify!($name)).to_owned(),
            c: concat!("sizeof(", layouts!(@type $name), ")").to_owned(),
            rust: size_of::<sys::$name>() as u64,
        });
        $checks.push(Check {
            name: concat!("alignof ", stringify!($name)).to_owned(),
            c: concat!("_Alignof(", layouts!(@type $name), ")").to_owned(),
            rust: align_of::<sys::$name>() as u64,
        });
        $($checks.push(Check {
            name: concat!(stringify!($name), ".", stringify!($field)).to_owned(),
            c: concat!("offsetof(", layouts!(@type $name), ", ", layouts!(@field $field), ")").to_owned(),
            rust: std::mem::offset_of!(sys::$name, $field) as u64,
        });)*
    )*};
    (@type ibv_gid) => { "union ibv_gid" };
    (@type $name:ident) => { concat!("struct ", stringify!($name)) };
    // bindgen's names for what has none in C, or another.
    (@field __bindgen_anon_1) => { "imm_data" };
    (@field type_) => { "type" };
    (@field $field:ident) => { stringify!($field) };
}

macro_rules! constants {
    ($checks:ident: $($name:ident)*) => {$(
        $checks.push(Check {
            name: stringify!($name).to_owned(),
            c: stringify!($name).to_owned(),
            rust: sys::$name as u64,
        });
    )*};
}

fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    layouts! { checks:
        ibv_gid { raw, global }
        ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex }
        ibv_device_attr {
            fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id, vendor_part_id, hw_ver, max_qp,
            max_qp_wr, device_cap_flags, max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom,
            max_res_rd_atom, max_qp_init_rd_atom, max_pkeys, phys_port_cnt,
        }
        ibv_port_attr {
            state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, pkey_tbl_len, lid, sm_lid, lmc, sm_sl,
            active_width, active_speed, phys_state, link_layer, flags, port_cap_flags2,
        }
        ibv_async_event { element, event_type }
        ibv_wc {
            wr_id, status, opcode, vendor_err, byte_len, __bindgen_anon_1, qp_num, src_qp, wc_flags, pkey_index, slid, sl,
            dlid_path_bits,
        }
        ibv_pd { context, handle }
        ibv_mr { context, pd, addr, length, handle, lkey, rkey }
        ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_qp_attr {
            qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap,
            ah_attr, alt_ah_attr, pkey_index, alt_pkey_index, en_sqd_async_notify, sq_draining, max_rd_atomic,
            max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout,
            rate_limit,
        }
        ibv_sge { addr, length, lkey }
        ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, __bindgen_anon_1, wr, qp_type }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
        ibv_qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex, cond, events_completed }
        ibv_comp_channel { context, fd, refcnt }
        ibv_cq { context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed, async_events_completed }
        ibv_device { _ops, node_type, transport_type, name, dev_name, dev_path, ibdev_path }
        ibv_context_ops { poll_cq, req_notify_cq, post_send, post_recv }
        ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
    }
    checks.push(Check {
        name: "ibv_send_wr.wr.rdma.remote_addr".to_owned(),
        c: "offsetof(struct ibv_send_wr, wr.rdma.remote_addr)".to_owned(),
        rust: (std::mem::offset_of!(sys::ibv_send_wr, wr)
            + std::mem::offset_of!(sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_1, remote_addr)) as u64,
    });
    checks.push(Check {
        name: "ibv_send_wr.wr.rdma.rkey".to_owned(),
        c: "offsetof(struct ibv_send_wr, wr.rdma.rkey)".to_owned(),
        rust: (std::mem::offset_of!(sys::ibv_send_wr, wr)
            + std::mem::offset_of!(sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_1, rkey)) as u64,
    });
    constants! { checks:
        IBV_QP_STATE IBV_QP_ACCESS_FLAGS IBV_QP_PKEY_INDEX IBV_QP_PORT IBV_QP_AV IBV_QP_PATH_MTU IBV_QP_TIMEOUT
        IBV_QP_RETRY_CNT IBV_QP_RNR_RETRY IBV_QP_RQ_PSN IBV_QP_MAX_QP_RD_ATOMIC IBV_QP_MIN_RNR_TIMER IBV_QP_SQ_PSN
        IBV_QP_MAX_DEST_RD_ATOMIC IBV_QP_DEST_QPN IBV_QPS_RESET IBV_QPS_INIT IBV_QPS_RTR IBV_QPS_RTS IBV_QPS_ERR
        IBV_QPT_RC IBV_ACCESS_LOCAL_WRITE IBV_ACCESS_REMOTE_WRITE IBV_ACCESS_REMOTE_READ IBV_ACCESS_RELAXED_ORDERING
        IBV_WR_RDMA_WRITE IBV_WR_RDMA_WRITE_WITH_IMM IBV_WR_RDMA_READ IBV_SEND_FENCE IBV_SEND_SIGNALED
        IBV_WC_SUCCESS IBV_WC_WR_FLUSH_ERR IBV_WC_REM_ACCESS_ERR IBV_WC_RETRY_EXC_ERR IBV_WC_RNR_RETRY_EXC_ERR
        IBV_WC_RECV IBV_WC_RECV_RDMA_WITH_IMM IBV_WC_WITH_IMM IBV_EVENT_QP_FATAL IBV_EVENT_PORT_ACTIVE
        IBV_EVENT_PORT_ERR IBV_EVENT_GID_CHANGE IBV_EVENT_DEVICE_FATAL IBV_MTU_256 IBV_MTU_4096 IBV_PORT_ACTIVE
        IBV_LINK_LAYER_INFINIBAND IBV_LINK_LAYER_ETHERNET IBV_TRANSPORT_IB IBV_TRANSPORT_IWARP IBV_NODE_RNIC
        IBV_GID_TYPE_IB IBV_GID_TYPE_ROCE_V1 IBV_GID_TYPE_ROCE_V2 IBV_FORK_DISABLED IBV_FORK_ENABLED IBV_FORK_UNNEEDED
    }
    // The bindings are generated on x86_64. Elsewhere a mutex has another size, and with it what comes after one; kvxfer
    // reads nothing there.
    if cfg!(not(target_arch = "x86_64")) {
        checks.retain(|check| !AFTER_A_MUTEX.contains(&check.name.as_str()));
    }
    checks
}

const AFTER_A_MUTEX: &[&str] = &[
    "sizeof ibv_qp",
    "ibv_qp.cond",
    "ibv_qp.events_completed",
    "sizeof ibv_cq",
    "ibv_cq.cond",
    "ibv_cq.comp_events_completed",
    "ibv_cq.async_events_completed",
    "sizeof ibv_context",
    "ibv_context.abi_compat",
];

fn program(checks: &[Check]) -> String {
    let mut text =
        String::from("#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void)\n{\n");
    for (index, check) in checks.iter().enumerate() {
        text.push_str(&format!(
            "\tprintf(\"{index} %llu\\n\", (unsigned long long)({}));\n",
            check.c
        ));
    }
    text.push_str("\treturn 0;\n}\n");
    text
}

fn run_in(directory: &Path, checks: &[Check]) -> Result<String, String> {
    let (source, binary) = (directory.join("layout.c"), directory.join("layout"));
    std::fs::write(&source, program(checks)).map_err(|error| error.to_string())?;
    let compiled = Command::new("cc")
        .arg("-o")
        .arg(&binary)
        .arg(&source)
        .output()
        .map_err(|error| format!("cc: {error}"))?;
    assert!(
        compiled.status.success(),
        "the header does not have what the bindings have:\n{}",
        String::from_utf8_lossy(&compiled.stderr)
    );
    let output = Command::new(&binary).output().map_err(|error| error.to_string())?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn generated_types_have_the_layout_of_the_systems_header() {
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        println!("skipped: /usr/include/infiniband/verbs.h is not installed (libibverbs-dev)");
        return;
    }
    let checks = checks();
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("layout-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let output = run_in(&directory, &checks);
    std::fs::remove_dir_all(&directory).unwrap();
    let output = match output {
        Ok(output) => output,
        Err(why) => {
            println!("skipped: {why}");
            return;
        }
    };
    let c: BTreeMap<usize, u64> = output
        .lines()
        .map(|line| {
            let (index, value) = line.split_once(' ').unwrap();
            (index.parse().unwrap(), value.parse().unwrap())
        })
        .collect();
    assert_eq!(c.len(), checks.len());
    for (index, check) in checks.iter().enumerate() {
        assert_eq!(check.rust, c[&index], "{} (ours against C's {})", check.name, check.c);
    }
}

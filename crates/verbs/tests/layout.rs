//! Compares the structs of `sys` with committed numbers, and with the system's C header if it is
//! installed.
//!
//! The committed numbers are those of rdma-core 44 (Debian 12's libibverbs-dev) on x86-64. The ABI
//! is the same on every 64-bit system with C's usual alignment, including macOS on Apple silicon.

use std::mem::{align_of, offset_of, size_of};
use thunder_verbs::sys::*;

/// For structs declared completely (`whole`), sizes are compared too; for the others (`head`), only
/// the offsets of declared fields.
macro_rules! layouts {
    (whole { $($whole:ident { $($field:ident),* })* } head { $($head:ident { $($head_field:ident),* })* }) => {
        /// Pairs of a C expression and Rust's value.
        fn layouts() -> Vec<(String, usize)> {
            let mut all = Vec::new();
            $(
                all.push((format!("sizeof(union_or_struct_{})", stringify!($whole)), size_of::<$whole>()));
                all.push((format!("_Alignof(union_or_struct_{})", stringify!($whole)), align_of::<$whole>()));
                $(all.push((format!("offsetof(union_or_struct_{}, {})", stringify!($whole), c_name(stringify!($field))),
                    offset_of!($whole, $field)));)*
            )*
            $($(all.push((format!("offsetof(union_or_struct_{}, {})", stringify!($head), c_name(stringify!($head_field))),
                offset_of!($head, $head_field)));)*)*
            all.into_iter().map(|(name, value)| (c_type(&name), value)).collect()
        }
    };
}

layouts! {
    whole {
        ibv_device_attr { fw_ver, node_guid, max_mr_size, vendor_id, max_qp, max_qp_wr, max_mr, max_srq_sge, max_pkeys,
            local_ca_ack_delay, phys_port_cnt }
        ibv_port_attr { state, active_mtu, gid_tbl_len, max_msg_sz, lid, active_width, active_speed, link_layer,
            port_cap_flags2 }
        ibv_gid { raw }
        ibv_mr { addr, length, handle, lkey, rkey }
        ibv_wc { wr_id, status, opcode, vendor_err, byte_len, qp_num, wc_flags, dlid_path_bits }
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        ibv_ah_attr { grh, dlid, is_global, port_num }
        ibv_qp_attr { qp_state, path_mtu, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap, ah_attr, alt_ah_attr,
            pkey_index, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry,
            rate_limit }
        ibv_sge { addr, length, lkey }
        ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, remote_addr, rkey }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
        ibv_context_ops { poll_cq, post_send, post_recv }
    }
    head {
        ibv_context { device, ops }
        ibv_qp { context, pd, send_cq, recv_cq, handle, qp_num }
    }
}

/// The C name of a field. Some are inside a union.
fn c_name(field: &str) -> &str {
    match field {
        "remote_addr" => "wr.rdma.remote_addr",
        other => other,
    }
}

fn c_type(expression: &str) -> String {
    let expression = expression.replace("(union_or_struct_ibv_gid", "(union ibv_gid");
    let expression = expression.replace("union_or_struct_", "struct ");
    expression.replace("(struct ibv_send_wr, rkey)", "(struct ibv_send_wr, wr.rdma.rkey)")
}

/// Values of the C header for some of these expressions.
const RDMA_CORE_44: &[(&str, usize)] = &[
    ("sizeof(struct ibv_device_attr)", 232),
    ("offsetof(struct ibv_device_attr, phys_port_cnt)", 227),
    ("sizeof(struct ibv_port_attr)", 52),
    ("offsetof(struct ibv_port_attr, link_layer)", 46),
    ("sizeof(struct ibv_mr)", 48),
    ("offsetof(struct ibv_mr, lkey)", 36),
    ("sizeof(struct ibv_wc)", 48),
    ("sizeof(struct ibv_qp_init_attr)", 64),
    ("sizeof(struct ibv_ah_attr)", 32),
    ("sizeof(struct ibv_qp_attr)", 144),
    ("offsetof(struct ibv_qp_attr, ah_attr)", 56),
    ("sizeof(struct ibv_send_wr)", 128),
    ("offsetof(struct ibv_send_wr, wr.rdma.rkey)", 48),
    ("sizeof(struct ibv_recv_wr)", 32),
    ("sizeof(struct ibv_context_ops)", 256),
    ("offsetof(struct ibv_context_ops, poll_cq)", 88),
    ("offsetof(struct ibv_context_ops, post_send)", 200),
    ("offsetof(struct ibv_context, ops)", 8),
    ("offsetof(struct ibv_qp, qp_num)", 52),
];

#[test]
fn layouts_equal_those_of_rdma_core_44() {
    let ours = layouts();
    for (name, expected) in RDMA_CORE_44 {
        let found = ours.iter().find(|(have, _)| have == name);
        assert_eq!(found.map(|(_, value)| value), Some(expected), "{name}");
    }
}

/// Without the header or a compiler, only the committed numbers above are compared.
#[cfg(target_os = "linux")]
#[test]
fn layouts_and_constants_equal_those_of_the_systems_header() {
    use std::process::Command;

    let header = std::path::Path::new("/usr/include/infiniband/verbs.h");
    if !header.exists() || Command::new("cc").arg("--version").output().is_err() {
        let reason = format!("no {} or no cc: compared with the committed numbers only", header.display());
        thunder_testing::skip("layouts_and_constants_equal_those_of_the_systems_header", &reason);
        return;
    }
    let constants = [
        ("IBV_QPT_RC", IBV_QPT_RC),
        ("IBV_QPT_UC", IBV_QPT_UC),
        ("IBV_QPS_INIT", IBV_QPS_INIT),
        ("IBV_QPS_RTR", IBV_QPS_RTR),
        ("IBV_QPS_RTS", IBV_QPS_RTS),
        ("IBV_WR_RDMA_WRITE", IBV_WR_RDMA_WRITE),
        ("IBV_WR_SEND", IBV_WR_SEND),
        ("IBV_SEND_SIGNALED", IBV_SEND_SIGNALED as i32),
        ("IBV_PORT_ACTIVE", IBV_PORT_ACTIVE),
        ("IBV_ACCESS_LOCAL_WRITE", IBV_ACCESS_LOCAL_WRITE),
        ("IBV_ACCESS_REMOTE_WRITE", IBV_ACCESS_REMOTE_WRITE),
        ("IBV_ACCESS_REMOTE_READ", IBV_ACCESS_REMOTE_READ),
        ("IBV_QP_STATE", IBV_QP_STATE),
        ("IBV_QP_ACCESS_FLAGS", IBV_QP_ACCESS_FLAGS),
        ("IBV_QP_PKEY_INDEX", IBV_QP_PKEY_INDEX),
        ("IBV_QP_PORT", IBV_QP_PORT),
        ("IBV_QP_AV", IBV_QP_AV),
        ("IBV_QP_PATH_MTU", IBV_QP_PATH_MTU),
        ("IBV_QP_TIMEOUT", IBV_QP_TIMEOUT),
        ("IBV_QP_RETRY_CNT", IBV_QP_RETRY_CNT),
        ("IBV_QP_RNR_RETRY", IBV_QP_RNR_RETRY),
        ("IBV_QP_RQ_PSN", IBV_QP_RQ_PSN),
        ("IBV_QP_MAX_QP_RD_ATOMIC", IBV_QP_MAX_QP_RD_ATOMIC),
        ("IBV_QP_MIN_RNR_TIMER", IBV_QP_MIN_RNR_TIMER),
        ("IBV_QP_SQ_PSN", IBV_QP_SQ_PSN),
        ("IBV_QP_MAX_DEST_RD_ATOMIC", IBV_QP_MAX_DEST_RD_ATOMIC),
        ("IBV_QP_DEST_QPN", IBV_QP_DEST_QPN),
    ];
    let constants = constants.map(|(name, value)| (name.to_string(), value as usize));
    let checks = layouts().into_iter().chain(constants);
    let asserts =
        checks.map(|(name, value)| format!("_Static_assert({name} == {value}, \"{name}, here {value}\");\n"));
    let source = format!(
        "#include <stddef.h>\n#include <infiniband/verbs.h>\n{}int main(void) {{ return 0; }}\n",
        asserts.collect::<String>()
    );
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("layout.c");
    std::fs::write(&file, source).unwrap();
    let output = Command::new("cc").arg("-fsyntax-only").arg(&file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

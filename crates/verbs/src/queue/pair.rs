//! Queue pairs and their states.

use super::options::{Connection, QueueAddress, QueueOptions};
use super::raw_pair::{RawPair, Received};
use super::send::SendSlot;
use super::window::Window;
use crate::device::{LocalPort, mtu_code};
use crate::error::{Error, Result};
use crate::memory::ProtectionDomain;
use crate::random::random_u32;
use crate::sys::*;
use std::sync::Arc;

/// The state after creation.
pub struct Reset;
/// The state of a pair that is bound to a port.
pub struct Init {
    port: LocalPort,
    psn: u32,
}
/// The state of a pair that is connected and receives packets.
pub struct ReadyToReceive {
    psn: u32,
}
/// The state of a pair that can post receives and sends.
pub struct ReadyToSend;

/// A queue pair in state `S`.
///
/// Only a ready pair can post:
/// ```compile_fail,E0599
/// # use thunder_verbs::{Init, QueuePair};
/// fn early(mut pair: QueuePair<Init>) { pair.post_receives().unwrap(); }
/// ```
/// A posted slot cannot be written:
/// ```compile_fail,E0382
/// # use thunder_verbs::{QueuePair, ReadyToSend};
/// fn late(mut pair: QueuePair<ReadyToSend>) {
///     let mut slot = pair.send_slot().unwrap();
///     slot.send(1).unwrap();
///     slot[0] = 1;
/// }
/// ```
/// A reposted slot cannot be read, and a pair cannot be dropped while a slot is borrowed:
/// ```compile_fail,E0382
/// # use thunder_verbs::{QueuePair, ReadyToSend, Received};
/// fn stale(mut pair: QueuePair<ReadyToSend>, token: Received) {
///     pair.repost(token).unwrap();
///     pair.bytes(&token);
/// }
/// ```
/// ```compile_fail,E0505
/// # use thunder_verbs::{QueuePair, ReadyToSend, Received};
/// fn gone(pair: QueuePair<ReadyToSend>, token: Received) -> u8 {
///     let bytes = pair.bytes(&token);
///     drop(pair);
///     bytes[0]
/// }
/// ```
pub struct QueuePair<S> {
    raw: RawPair,
    state: S,
}

impl QueuePair<Reset> {
    /// Creates a pair with its completion queue, rings and window.
    pub fn create(domain: &Arc<ProtectionDomain>, options: QueueOptions) -> Result<Self> {
        let context = domain.context();
        if options.connection == Connection::Rc && !context.profile().reliable {
            let device = context.name().to_string();
            return Err(Error::Unsupported {
                device,
                wanted: "reliable connections (RC)",
                instead: "unreliable connections (UC)",
            });
        }
        Ok(Self { raw: RawPair::create(domain, options)?, state: Reset })
    }

    /// Binds the pair to a port.
    pub fn init(self, port: &LocalPort) -> Result<QueuePair<Init>> {
        let mut attr = blank_attr();
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = port.number;
        attr.qp_access_flags = self.raw.access() as u32;
        self.raw.modify(attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)?;
        Ok(QueuePair { raw: self.raw, state: Init { port: *port, psn: random_psn()? } })
    }
}

impl QueuePair<Init> {
    /// The address that the peer needs to connect.
    pub fn address(&self) -> QueueAddress {
        let port = &self.state.port;
        QueueAddress {
            qpn: self.raw.number(),
            psn: self.state.psn,
            gid: port.gid,
            lid: port.lid,
            mtu_bytes: port.mtu_bytes,
            window: self.raw.window().map(Window::remote),
        }
    }

    /// Connects to the peer's pair.
    pub fn connect(self, peer: &QueueAddress) -> Result<QueuePair<ReadyToReceive>> {
        let port = &self.state.port;
        let mut attr = blank_attr();
        attr.qp_state = IBV_QPS_RTR;
        attr.path_mtu = mtu_code(port.mtu_bytes.min(peer.mtu_bytes));
        attr.dest_qp_num = peer.qpn;
        attr.rq_psn = peer.psn;
        attr.ah_attr.grh.dgid.raw = peer.gid.bytes();
        attr.ah_attr.grh.sgid_index = port.gid_index;
        attr.ah_attr.grh.hop_limit = HOP_LIMIT;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.dlid = peer.lid;
        attr.ah_attr.port_num = port.number;
        let mut mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        if self.raw.connection() == Connection::Rc {
            attr.min_rnr_timer = RNR_TIMER_CODE;
            mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        }
        self.raw.modify(attr, mask)?;
        Ok(QueuePair { raw: self.raw, state: ReadyToReceive { psn: self.state.psn } })
    }
}

impl QueuePair<ReadyToReceive> {
    /// Makes the pair able to send. Receives can be posted from this state on; Apple's devices
    /// refuse them earlier.
    pub fn activate(self) -> Result<QueuePair<ReadyToSend>> {
        let mut attr = blank_attr();
        attr.qp_state = IBV_QPS_RTS;
        attr.sq_psn = self.state.psn;
        let mut mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
        if self.raw.connection() == Connection::Rc {
            attr.timeout = ACK_TIMEOUT_CODE;
            attr.retry_cnt = RETRIES;
            attr.rnr_retry = RETRIES - 1;
            mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
        }
        self.raw.modify(attr, mask)?;
        Ok(QueuePair { raw: self.raw, state: ReadyToSend })
    }
}

impl QueuePair<ReadyToSend> {
    /// Posts every receive slot that is not posted, and returns the number of posted slots. A
    /// device that accepts fewer than it reported is not an error if it accepts one; report this
    /// number to the peer.
    pub fn post_receives(&mut self) -> Result<u32> {
        self.raw.post_receives()
    }

    /// The next free send slot; `None` while all are in flight ([`Self::poll`] frees them).
    pub fn send_slot(&mut self) -> Option<SendSlot<'_>> {
        SendSlot::next(&mut self.raw)
    }

    /// The number of sends that have not completed.
    pub fn outstanding(&self) -> usize {
        self.raw.outstanding()
    }

    /// Reads completions, passes each received message to `received`, and returns the number of
    /// completions. Any status other than success is an error that names the status; the pair is
    /// unusable after it.
    pub fn poll(&mut self, received: impl FnMut(Received)) -> Result<usize> {
        self.raw.poll(received)
    }

    /// The bytes of a received message. Empty if the token belongs to another pair.
    pub fn bytes(&self, token: &Received) -> &[u8] {
        self.raw.bytes(token)
    }

    /// Posts the token's slot again, for another message.
    pub fn repost(&mut self, token: Received) -> Result<()> {
        self.raw.repost(token)
    }

    /// The memory that the peer may write, if any.
    pub fn window(&self) -> Option<&Window> {
        self.raw.window()
    }

    /// The pair's device and number, for error messages.
    pub fn name(&self) -> &str {
        self.raw.name()
    }
}

/// Most routers on a packet's path. Cables have none; RoCE v2 networks have a few.
const HOP_LIMIT: u8 = 64;
/// 4.096 µs · 2^18 = 1.1 s until an unacknowledged packet is repeated. Devices request a missing
/// packet at once, so this applies only if that request is lost too. The value is long because
/// Soft-RoCE fails on repeats of packets that had arrived: at 1 ms (code 8), its responder refused
/// some (IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR), which ends the connection. With this value,
/// the tests of tools/rdma-vm pass even on a tenth of a core.
const ACK_TIMEOUT_CODE: u8 = 18;
/// The largest value of the field. A dead peer is detected after about 8 s; a caller that watches
/// the peer detects it at once.
const RETRIES: u8 = 7;
/// 0.64 ms until a sender retries after it found no posted receive. Credits prevent that case.
const RNR_TIMER_CODE: u8 = 12;

fn blank_attr() -> ibv_qp_attr {
    // SAFETY: all fields are integers, for which zero is valid.
    unsafe { std::mem::zeroed() }
}

/// A random first packet number, so that late packets of an earlier connection between the same
/// pairs do not match this one.
fn random_psn() -> Result<u32> {
    Ok(random_u32()? & 0xff_ffff)
}

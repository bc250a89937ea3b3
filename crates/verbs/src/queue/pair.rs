//! Queue pairs whose state is their type.

use super::core::{Core, Received};
use super::options::{Connection, QueueAddress, QueueOptions};
use super::send::SendSlot;
use super::window::Window;
use crate::device::{LocalPort, mtu_code};
use crate::error::{Error, Result};
use crate::memory::ProtectionDomain;
use crate::random::random_u32;
use crate::sys::*;
use std::sync::Arc;

/// Just created.
pub struct Reset;
/// Bound to a port.
pub struct Init {
    port: LocalPort,
    psn: u32,
}
/// Connected: takes packets in.
pub struct ReadyToReceive {
    psn: u32,
}
/// Able to post receives and sends.
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
/// fn late(mut pair: QueuePair<ReadyToSend>) { let mut slot = pair.send_slot().unwrap(); slot.send(1).unwrap(); slot[0] = 1; }
/// ```
/// A slot that was given back cannot be read, and the pair cannot go while one is read:
/// ```compile_fail,E0382
/// # use thunder_verbs::{QueuePair, ReadyToSend, Received};
/// fn stale(mut pair: QueuePair<ReadyToSend>, token: Received) { pair.repost(token).unwrap(); pair.bytes(&token); }
/// ```
/// ```compile_fail,E0505
/// # use thunder_verbs::{QueuePair, ReadyToSend, Received};
/// fn gone(pair: QueuePair<ReadyToSend>, token: Received) -> u8 { let bytes = pair.bytes(&token); drop(pair); bytes[0] }
/// ```
pub struct QueuePair<S> {
    core: Core,
    state: S,
}

impl QueuePair<Reset> {
    /// Creates the pair with its completion queue, rings and window.
    pub fn create(domain: &Arc<ProtectionDomain>, options: QueueOptions) -> Result<Self> {
        let context = domain.context();
        if options.connection == Connection::Rc && !context.profile().reliable {
            let device = context.name().to_string();
            return Err(Error::Unsupported {
                device,
                wanted: "reliable connections (RC)",
                instead: "unreliable ones (UC)",
            });
        }
        Ok(Self { core: Core::create(domain, options)?, state: Reset })
    }

    /// Binds it to a port.
    pub fn init(self, port: &LocalPort) -> Result<QueuePair<Init>> {
        let mut attr = blank_attr();
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = port.number;
        attr.qp_access_flags = self.core.access() as u32;
        self.core.modify(attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)?;
        Ok(QueuePair { core: self.core, state: Init { port: *port, psn: random_psn()? } })
    }
}

impl QueuePair<Init> {
    /// What the peer must know to connect.
    pub fn address(&self) -> QueueAddress {
        let port = &self.state.port;
        QueueAddress {
            qpn: self.core.number(),
            psn: self.state.psn,
            gid: port.gid,
            lid: port.lid,
            mtu_bytes: port.mtu_bytes,
            window: self.core.window().map(Window::remote),
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
        if self.core.connection() == Connection::Rc {
            attr.min_rnr_timer = RNR_TIMER_CODE;
            mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        }
        self.core.modify(attr, mask)?;
        Ok(QueuePair { core: self.core, state: ReadyToReceive { psn: self.state.psn } })
    }
}

impl QueuePair<ReadyToReceive> {
    /// Makes it able to post. Receives can be posted from here on and no earlier: Apple's devices refuse them before.
    pub fn activate(self) -> Result<QueuePair<ReadyToSend>> {
        let mut attr = blank_attr();
        attr.qp_state = IBV_QPS_RTS;
        attr.sq_psn = self.state.psn;
        let mut mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
        if self.core.connection() == Connection::Rc {
            attr.timeout = ACK_TIMEOUT_CODE;
            attr.retry_cnt = RETRIES;
            attr.rnr_retry = RETRIES - 1;
            mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
        }
        self.core.modify(attr, mask)?;
        Ok(QueuePair { core: self.core, state: ReadyToSend })
    }
}

impl QueuePair<ReadyToSend> {
    /// Posts every receive slot that is not posted; returns how many are posted now. A device that takes fewer than it
    /// said is not an error as long as it takes one: the number is what the peer may be told.
    pub fn post_receives(&mut self) -> Result<u32> {
        self.core.post_receives()
    }

    /// The next free send slot; none while all are on their way ([`Self::poll`] frees them).
    pub fn send_slot(&mut self) -> Option<SendSlot<'_>> {
        SendSlot::next(&mut self.core)
    }

    /// Sends that have not completed.
    pub fn outstanding(&self) -> usize {
        self.core.outstanding()
    }

    /// Reads what has completed, gives each received message to `received`, and returns how many requests completed.
    /// Any status but success is an error that names it; the pair is of no use after.
    pub fn poll(&mut self, received: impl FnMut(Received)) -> Result<usize> {
        self.core.poll(received)
    }

    /// What was received. Empty if the token is another pair's.
    pub fn bytes(&self, token: &Received) -> &[u8] {
        self.core.bytes(token)
    }

    /// Gives the slot back to the device for the next message.
    pub fn repost(&mut self, token: Received) -> Result<()> {
        self.core.repost(token)
    }

    /// The memory that the peer may write into.
    pub fn window(&self) -> Option<&Window> {
        self.core.window()
    }

    /// The pair's device and number, for messages.
    pub fn name(&self) -> &str {
        self.core.name()
    }
}

/// Routers that a packet may pass. Cables are direct; RoCE v2 networks have a few.
const HOP_LIMIT: u8 = 64;
/// 4.096 µs · 2^18 = 1.1 s until a packet that was not acknowledged is repeated. Devices ask at once for what they miss;
/// this is for the rest, and long because Soft-RoCE does not bear repeats of what has arrived: at 1 ms (code 8) its
/// responder refused some (IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR), which ends the connection. With this value the tests
/// of tools/rdma-vm pass on a tenth of a core too.
const ACK_TIMEOUT_CODE: u8 = 18;
/// The most that the field holds. A gone peer shows after some 8 s here, and at once to whoever watches it.
const RETRIES: u8 = 7;
/// 0.64 ms until a sender that met no receive tries again. With credits it never has to.
const RNR_TIMER_CODE: u8 = 12;

fn blank_attr() -> ibv_qp_attr {
    // SAFETY: all fields are integers, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

/// Packets of an earlier connection between the same pairs must not fit into this one.
fn random_psn() -> Result<u32> {
    Ok(random_u32()? & 0xff_ffff)
}

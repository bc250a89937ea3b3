//! A queue pair without its state: resources, posting and completions.

use super::options::{Connection, QueueOptions};
use super::ring::{CompletionQueue, PairMemory};
use super::window::Window;
use crate::device::Context;
use crate::error::{Error, Result};
use crate::memory::ProtectionDomain;
use crate::status::WcStatus;
use crate::sys::*;
use std::mem::ManuallyDrop;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Flag in the id of a receive request; the other bits are its slot. A send's id is the number of
/// sends before it.
const RECEIVE: u64 = 1 << 63;
/// Completions read at a time.
const BATCH: usize = 16;

/// A received message in its slot. The slot belongs to this token until `repost`. Dropping the
/// token loses the slot to the queue pair.
#[must_use = "the slot is lost to the queue pair until the token is reposted"]
#[derive(Debug)]
pub struct Received {
    pair: u64,
    slot: u32,
    len: u32,
}

impl Received {
    /// Length of the message in bytes.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// True if the message has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

pub(super) struct RawPair {
    raw: NonNull<ibv_qp>,
    /// Distinguishes this pair's tokens from another pair's.
    id: u64,
    name: String,
    connection: Connection,
    pub(super) memory: ManuallyDrop<PairMemory>,
    /// Totals of posted and completed sends. The next slot is `posted` modulo the number of slots.
    pub(super) posted: u64,
    completed: u64,
    /// True for each receive slot that is posted to the device.
    receive_posted: Vec<bool>,
    completions: CompletionQueue,
    domain: Arc<ProtectionDomain>,
}

// SAFETY: the pair owns everything that its pointers point to, and verbs calls may be made from any
// thread.
unsafe impl Send for RawPair {}

impl RawPair {
    pub(super) fn create(domain: &Arc<ProtectionDomain>, options: QueueOptions) -> Result<Self> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let context = domain.context();
        let device_limit = context.limits()?.requests_per_queue.max(2);
        // A one-sided message is two requests: the data, then the flag.
        let requests_per_send = if options.window_bytes > 0 { 2 } else { 1 };
        let sends = options.sends.min(context.profile.max_sends.min(device_limit) / requests_per_send);
        let receives = options.receives.min(context.profile.max_receives).min(device_limit);
        if sends == 0 || receives == 0 || options.slot_bytes < 64 || options.slot_bytes > i32::MAX as usize {
            let rule =
                "it must have 64 bytes to 2 GiB, and the pair at least one send and one receive".to_string();
            return Err(Error::BadSize { what: "a queue pair's slot", value: options.slot_bytes, rule });
        }

        let completions = CompletionQueue::new(context, sends * requests_per_send + receives)?;
        let mut init = init_attributes(&completions, options.connection, sends * requests_per_send, receives);
        // SAFETY: the domain and the completion queue are alive; `init` has the layout of the C
        // header.
        let raw = unsafe { (context.library.ibv_create_qp)(domain.raw.as_ptr(), &mut init) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last_os("ibv_create_qp", context.name()))?;
        // After this, a failure must destroy the pair.
        let destroy = |error| {
            // SAFETY: the pair was created above, and nothing is posted.
            unsafe { (context.library.ibv_destroy_qp)(raw.as_ptr()) };
            error
        };
        // The call may report fewer slots than requested. Apple's devices report more than they
        // accept.
        let sends = sends.min(init.cap.max_send_wr / requests_per_send).max(1);
        let receives = receives.min(init.cap.max_recv_wr).max(1);
        let memory = PairMemory::new(domain, options, sends, receives).map_err(destroy)?;
        // SAFETY: `raw` is a live pair, which begins with the fields declared in `sys`.
        let number = unsafe { (*raw.as_ptr()).qp_num };
        Ok(Self {
            raw,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            name: format!("{} queue pair {number}", context.name()),
            connection: options.connection,
            memory: ManuallyDrop::new(memory),
            posted: 0,
            completed: 0,
            receive_posted: vec![false; receives as usize],
            completions,
            domain: Arc::clone(domain),
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn connection(&self) -> Connection {
        self.connection
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: the pair lives until drop.
        unsafe { (*self.raw.as_ptr()).qp_num }
    }

    pub(super) fn window(&self) -> Option<&Window> {
        self.memory.window.as_ref()
    }

    pub(super) fn access(&self) -> i32 {
        self.context().profile.access(self.memory.window.is_some())
    }

    fn context(&self) -> &Context {
        self.domain.context()
    }

    pub(super) fn modify(&self, mut attr: ibv_qp_attr, mask: i32) -> Result<()> {
        // SAFETY: the pair is alive; `attr` has the layout of the C header.
        let errno = unsafe { (self.context().library.ibv_modify_qp)(self.raw.as_ptr(), &mut attr, mask) };
        if errno == 0 { Ok(()) } else { Err(Error::errno("ibv_modify_qp", &self.name, errno)) }
    }

    pub(super) fn outstanding(&self) -> usize {
        (self.posted - self.completed) as usize
    }

    /// Posts a chain of requests for the send slot of number `posted`.
    pub(super) fn post_send(&mut self, first: &mut ibv_send_wr) -> Result<()> {
        let mut bad = null_mut();
        // SAFETY: the pair can send (only `ReadyToSend` calls this). The chain and its entries live
        // for the call, and the memory that they refer to is not accessed until the completion is
        // read.
        let errno = unsafe { (self.context().post_send)(self.raw.as_ptr(), first, &mut bad) };
        // Counted after a failure too: the device may have accepted the first request of the chain,
        // so the slot must not be reused.
        self.posted += 1;
        if errno == 0 { Ok(()) } else { Err(Error::errno("ibv_post_send", &self.name, errno)) }
    }

    pub(super) fn post_receives(&mut self) -> Result<u32> {
        for slot in 0..self.receive_posted.len() {
            if self.receive_posted[slot] {
                continue;
            }
            match self.post_receive(slot) {
                Err(Error::Call { errno: libc::ENOMEM, .. }) if slot > 0 => break,
                other => other?,
            }
        }
        Ok(self.receive_posted.iter().filter(|posted| **posted).count() as u32)
    }

    fn post_receive(&mut self, slot: usize) -> Result<()> {
        let ring = &self.memory.receives;
        let mut sge = ring.sge(slot, 0, ring.slot_bytes);
        let mut request =
            ibv_recv_wr { wr_id: RECEIVE | slot as u64, next: null_mut(), sg_list: &mut sge, num_sge: 1 };
        let mut bad = null_mut();
        // SAFETY: the pair is ready; the request and its entry live for the call. Nothing else uses
        // the slot: it was never posted, or its token was passed to `repost`.
        let errno = unsafe { (self.context().post_recv)(self.raw.as_ptr(), &mut request, &mut bad) };
        if errno != 0 {
            return Err(Error::errno("ibv_post_recv", &self.name, errno));
        }
        self.receive_posted[slot] = true;
        Ok(())
    }

    pub(super) fn poll(&mut self, mut received: impl FnMut(Received)) -> Result<usize> {
        // SAFETY: all fields are integers, for which zero is valid.
        let mut batch: [ibv_wc; BATCH] = unsafe { std::mem::zeroed() };
        let poll_cq = self.context().poll_cq;
        // SAFETY: the queue is alive, and the call writes at most BATCH entries.
        let count = unsafe { poll_cq(self.completions.raw.as_ptr(), BATCH as i32, batch.as_mut_ptr()) };
        let count = usize::try_from(count).map_err(|_| Error::errno("ibv_poll_cq", &self.name, count))?;
        for completion in &batch[..count.min(BATCH)] {
            self.complete(completion, &mut received)?;
        }
        Ok(count)
    }

    fn complete(&mut self, completion: &ibv_wc, received: &mut impl FnMut(Received)) -> Result<()> {
        let id = completion.wr_id;
        let status = WcStatus::from_raw(completion.status);
        if status != WcStatus::Success {
            let operation = if id & RECEIVE != 0 { "receive" } else { "send" };
            let (queue, vendor) = (self.name.clone(), completion.vendor_err);
            return Err(Error::Completion { queue, operation, status, vendor });
        }
        let stray = || Error::StrayCompletion { queue: self.name.clone(), id };
        if id & RECEIVE == 0 {
            // Sends complete in the order of posting.
            if id != self.completed || id >= self.posted {
                return Err(stray());
            }
            self.completed += 1;
            return Ok(());
        }
        let slot = (id & !RECEIVE) as usize;
        let fits = completion.byte_len as usize <= self.memory.receives.slot_bytes;
        if !fits || self.receive_posted.get(slot) != Some(&true) {
            return Err(stray());
        }
        self.receive_posted[slot] = false;
        received(Received { pair: self.id, slot: slot as u32, len: completion.byte_len });
        Ok(())
    }

    pub(super) fn bytes(&self, token: &Received) -> &[u8] {
        if token.pair != self.id {
            return &[];
        }
        let slot = self.memory.receives.slot(token.slot as usize);
        // SAFETY: the range is inside the slot (`complete` checked the length). The device does not
        // use the slot: its completion was read before the token was made, and posting it again
        // consumes the token and needs `&mut self`.
        unsafe { std::slice::from_raw_parts(slot, token.len()) }
    }

    pub(super) fn repost(&mut self, token: Received) -> Result<()> {
        if token.pair != self.id {
            let queue = self.name.clone();
            return Err(Error::StrayCompletion { queue, id: RECEIVE | u64::from(token.slot) });
        }
        self.post_receive(token.slot as usize)
    }
}

fn init_attributes(
    completions: &CompletionQueue,
    connection: Connection,
    max_send_wr: u32,
    max_recv_wr: u32,
) -> ibv_qp_init_attr {
    ibv_qp_init_attr {
        qp_context: null_mut(),
        send_cq: completions.raw.as_ptr(),
        recv_cq: completions.raw.as_ptr(),
        srq: null_mut(),
        cap: ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 },
        qp_type: match connection {
            Connection::Rc => IBV_QPT_RC,
            Connection::Uc => IBV_QPT_UC,
        },
        sq_sig_all: 0,
    }
}

impl Drop for RawPair {
    fn drop(&mut self) {
        // Not moved to the error state first: on Apple's driver, every later unmap would fail.
        // SAFETY: the pair exists and is destroyed once.
        let errno = unsafe { (self.context().library.ibv_destroy_qp)(self.raw.as_ptr()) };
        // A pair that could not be destroyed may still use its memory, which must then never be
        // freed.
        if errno == 0 {
            // SAFETY: the memory is dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}
